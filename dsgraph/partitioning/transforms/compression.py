"""1-bit compression of gradients: the tensors that a rank keeps for each parameter, and their updates.

Captured graphs read momentum, errors and coefficients as inputs (`seam.property_for`), and `reduce_compressed` returns
new values. These come back as *gradients* of the inputs: nothing is written to before the optimizer steps. A skipped
step drops them, and the errors stay unchanged.
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
    """1-bit compression of one parameter: its momentum is sent as signs, in place of its gradient.

    Attributes:
        momentum: `[*shape]` of float32, equal on all ranks.
        worker_error: `[numel]` of float32: what this rank has not sent yet.
        owner_error: `[numbers of this rank's chunk]` of float32: what it has not sent of the average.
        coefficients: `[2]` of float32, the same for all parameters: the factors of momentum and gradient.
        splits_rows: True if each rank keeps its rows of the parameter.
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
        """The tensors for which a reduction gives new values."""
        errors = (self.worker_error, self.owner_error)
        return (self.momentum, *errors) if self.splits_rows else errors

    @override
    def reduce(self, grad: Tensor, shard: Tensor, **options: Any) -> Tensor:
        self.note_arrival()
        return super().reduce(grad, shard, **options)

    def has_news(self) -> bool:
        """Return whether a reduction has given new values since the last step."""
        return self.worker_error.grad is not None

    def note_arrival(self) -> None:
        """Note that a backward has given new values.

        Raises:
            PartitionError: It is the second time since the last step.
        """
        self._arrivals += 1
        if self._arrivals > 1:
            raise PartitionError(
                f"the gradient of {self.name!r} was reduced twice before a step, and it is compressed: a momentum "
                "takes in one gradient a step. Run micro-batches under dsgraph.accumulate or by the engine, and read "
                "the parameter in one compiled graph"
            )

    def take_over(self) -> None:
        """Take over the new values of the reduction."""
        with torch.no_grad():
            for tensor in self.kept:
                if tensor.grad is not None:
                    tensor.copy_(tensor.grad)
        self.drop()

    def drop(self) -> None:
        """Drop the new values of the reduction."""
        self._arrivals = 0
        for tensor in self.kept:
            tensor.grad = None
