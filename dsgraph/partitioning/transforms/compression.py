"""Compressed gradients: what a rank keeps of each parameter while momentum travels as signs, and what it takes over.

Captured graphs read momentum, errors and coefficients as inputs (`seam.property_for`), and `reduce_compressed` gives
new ones. Those come back as *gradients* of the inputs: nothing is written to before the optimizer steps. A step that is
skipped drops them, and errors are as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dsgraph.inductor_ext import COMPRESSED
from dsgraph.utils.errors import PartitionError

from .parameter_transform import ParameterTransform


@dataclass(eq=False)
class Compression(ParameterTransform):
    """Momentum takes the place of one parameter's gradient, and travels as signs.

    Attributes:
        momentum: `[*shape]` of float32, equal on all ranks.
        worker_error: `[numel]` of float32: what this rank has not sent yet.
        owner_error: `[numbers of this rank's chunk]` of float32: what it has not sent of the average.
        coefficients: `[2]` of float32, of all parameters alike: what momentum and gradient are multiplied by.
        splits_rows: Whether each rank keeps its rows of the parameter.
        name: The parameter's.
    """

    reduction: ClassVar[str] = COMPRESSED

    momentum: Tensor
    worker_error: Tensor
    owner_error: Tensor
    coefficients: Tensor
    splits_rows: bool
    name: str
    _arrivals: int = 0

    @property
    @override
    def inputs(self) -> tuple[Tensor, ...]:
        """Momentum, the two errors and the coefficients."""
        return self.momentum, self.worker_error, self.owner_error, self.coefficients

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What a reduction gives new values of."""
        errors = (self.worker_error, self.owner_error)
        return (self.momentum, *errors) if self.splits_rows else errors

    @override
    def reduce(self, grad: Tensor, shard: Tensor, **options: Any) -> Tensor:
        self.note_arrival()
        return super().reduce(grad, shard, **options)

    def has_news(self) -> bool:
        """Whether a reduction has come since the last step."""
        return self.worker_error.grad is not None

    def note_arrival(self) -> None:
        """Hears that a backward has given new values.

        Raises:
            PartitionError: For the second time since the last step.
        """
        self._arrivals += 1
        if self._arrivals > 1:
            raise PartitionError(
                f"the gradient of {self.name!r} was reduced twice before a step, and it is compressed: a momentum "
                "takes in one gradient a step. Run micro-batches under dsgraph.accumulate or by the engine, and read "
                "the parameter in one compiled graph"
            )

    def take_over(self) -> None:
        """Takes what the reduction has given."""
        with torch.no_grad():
            for tensor in self.kept:
                if tensor.grad is not None:
                    tensor.copy_(tensor.grad)
        self.drop()

    def drop(self) -> None:
        """Drops what the reduction has given."""
        self._arrivals = 0
        for tensor in self.kept:
            tensor.grad = None
