"""How a parameter is laid out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext import one_group, start_reduction

from .stages import STAGES, ZeroStage
from .transforms.parameter_transform import ParameterTransform


@dataclass(frozen=True)
class Layout:
    """How a parameter is laid out. Equal for equal parameters, so that equal layers share one class and one graph.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        shape: Shape of the full parameter.
        param_dtype: Dtype in which the forward sees it; None for the master dtype.
        reduce_dtype: Dtype in which its gradient is summed; None for the dtype in which the forward sees it.
        group: Process group over which its rows are split; "" when every rank holds it whole.
        outer_groups: Process groups over which its gradient is averaged besides.
    """

    stage: int
    shape: tuple[int, ...]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    group: str
    outer_groups: tuple[str, ...]

    @property
    def zero(self) -> ZeroStage:
        """What the stage does."""
        return STAGES[self.stage]

    def dtypes(self, master: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of the full parameter, dtype of the reduction."""
        compute = self.param_dtype or master
        return compute, self.reduce_dtype or compute

    def mark(
        self,
        shard: Tensor,
        gathered_copy: Tensor | None,
        shape: Sequence[int],
        accumulated_grad: Tensor | None = None,
        reducer: ParameterTransform | None = None,
    ) -> Tensor:
        """The marker for this layout, or, run eagerly, the gather itself. `shape` is that of the full parameter.

        With an `accumulated_grad` the backend decides whether the gradient is reduced together with it. With a
        `reducer`, that transform reduces it.
        """
        added, options = self.marker_inputs(accumulated_grad, reducer), self.marker_options(shard.dtype, reducer)
        return torch.ops.dsgraph.gather_param(shard, gathered_copy, shape, *added, **options)

    @property
    def reduced_over(self) -> tuple[str, bool]:
        """The one group over which a transform reduces a gradient, and whether it splits the parameter's rows."""
        return one_group(self.group, self.outer_groups)

    @staticmethod
    def marker_inputs(accumulated_grad: Tensor | None, reducer: ParameterTransform | None) -> tuple[Any, ...]:
        """What a marker reads besides the parameter."""
        if reducer is not None:
            return accumulated_grad, list(reducer.inputs)
        return () if accumulated_grad is None else (accumulated_grad,)

    def marker_options(self, master: torch.dtype, reducer: ParameterTransform | None = None) -> dict[str, Any]:
        """What a marker says besides tensors, of a parameter of this dtype."""
        dtype, reduce_dtype = self.dtypes(master)
        options = {
            "dtype": dtype,
            "reduce_dtype": reduce_dtype,
            "group": self.group,
            "outer_groups": list(self.outer_groups),
        }
        return options if reducer is None else {**options, "reduction": reducer.reduction}

    def local(self, leaf: Tensor) -> Tensor:
        """A full parameter whose gradient stays on this rank, in the dtype that the forward sees."""
        return leaf if self.param_dtype is None else leaf.to(self.param_dtype)

    def reduce(self, grad: Tensor, shard: Tensor) -> Tensor:
        """This rank's part of the averaged gradient. `grad`: `[*shape]`; result: like `shard`."""
        if torch.is_grad_enabled() and grad.requires_grad:  # for second derivatives, which the op refuses
            return self._reduce_by_op(grad, shard)
        return self.start_reducing(grad, shard)()

    def _reduce_by_op(self, grad: Tensor, shard: Tensor) -> Tensor:
        return torch.ops.dsgraph.reduce_grad(grad, shard.shape, **self.reduction_options(shard.dtype))

    def reduction_options(self, master: torch.dtype) -> dict[str, Any]:
        """What a reduction is told besides tensors, of a parameter of this dtype."""
        return {**self.marker_options(master), "dtype": master}

    def start_reducing(self, grad: Tensor, shard: Tensor) -> Callable[[], Tensor]:
        """The same in two parts: the first lets the gradient travel, the result waits for it."""
        return start_reduction(grad, shard.shape, **self.reduction_options(shard.dtype))
