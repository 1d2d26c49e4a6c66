"""The hooks of an optimizer around backward, step, save and load, and the base of those that step another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from dsgraph.partitioning.rows import scales_like, split_dims
from dsgraph.utils.errors import OffloadError

from .chunks import has_stepped

Groups = list[dict[str, Any]]
"""Groups of parameters with their options, as for `torch.optim`."""

# They update each element by itself, so steps on rows, or on some parameters first, give the same result.
ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
)


class OptimizerHooks:
    """Hooks that the engine and checkpoints call in addition to `step`. Subclasses override what they need.

    Attributes:
        is_elementwise: True if each element is updated from its own gradient and state, so that state can be
            offloaded.
        needs_full_matrices: True if an update needs all rows of a parameter, see `FullMatrixOptimizer`.
        is_compressing: True if gradients are averaged momenta now, which no rank can clip.
        has_state_on_disk: True if a checkpoint is read into the state itself, not into copies.
        own_keys: Keys of state that each tensor-parallel rank stores for its slice of a parameter, in a shape of its
            own.
    """

    is_elementwise: ClassVar[bool] = False
    needs_full_matrices: ClassVar[bool] = False
    is_compressing: bool = False
    has_state_on_disk: bool = False
    own_keys: ClassVar[frozenset[str]] = frozenset()

    def beside_backward(self) -> AbstractContextManager[None]:
        """Surround the last backward of a step, which may begin the step."""
        return nullcontext()

    def start_reading(self) -> None:
        """Start to read what `step` needs first; called before the global gradient norm is computed."""

    def finish(self) -> None:
        """Apply a pending update; called after the last step and when a step is skipped."""

    def set_scale(self, scale: float) -> None:
        """Note the factor by which losses are multiplied from now on."""

    def close(self) -> None:
        """Remove files and end threads; no `step` is possible afterwards."""

    def owns(self, param: Tensor) -> bool | None:
        """Return whether this rank stores the state of a parameter; None if each rank stores that of its rows."""
        return None

    def empty_state(self, param: Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor into which one of a checkpoint is read; None if it is not taken over.

        Args:
            param: The parameter.
            key: The name of the tensor in the parameter's state.
            size: The shape of the saved tensor.
            dtype: Its dtype.
        """
        if key.startswith("absmax") and split_dims(param):
            return scales_like(param, dtype)
        is_like_rows = self.owns(param) is None and size == param.shape and len(size) > 0 and key[:4] != "qmap"
        return torch.empty_like(param, dtype=dtype) if is_like_rows else torch.empty(size, dtype=dtype)

    def state_on_disk(self, param: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a parameter's state that are on disk, by name."""
        return {}

    def take_state(self, state: Any, param: Tensor, found: dict[str, Any]) -> None:
        """Store what a checkpoint has of a parameter.

        Args:
            state: The state of the optimizer.
            param: The parameter.
            found: Its state, by name; tensors on disk are filled already.
        """
        state[param] = found

    def after_load(self) -> None:
        """Continue as the loaded state says. All ranks call it together."""

    def refuse_load(self) -> None:
        """Raise an error if nothing can be loaded now.

        Raises:
            OffloadError: A backward has begun a step.
        """

    def refuse_failed(self) -> None:
        """Raise an error if a failure has left the state incomplete.

        Raises:
            OffloadError: An earlier step or load has failed.
        """

    def refuse_steps(self, failure: BaseException | None) -> None:
        """Refuse later steps because of a failed load; None allows them again."""


_DEFAULTS = OptimizerHooks()


def hooks_of(optimizer: Optimizer | None) -> OptimizerHooks:
    """Return the hooks of an optimizer; the defaults if it is no `OptimizerHooks`, or None."""
    return optimizer if isinstance(optimizer, OptimizerHooks) else _DEFAULTS


class WrappedOptimizer(OptimizerHooks, Optimizer):
    """An optimizer that steps another one. Its groups are the inner optimizer's own dicts.

    The inner optimizer's own hooks are not called, except for `is_elementwise` and `needs_full_matrices`.

    Attributes:
        inner: The optimizer that computes updates.
    """

    def __init__(self, inner: Optimizer) -> None:
        """Take over an optimizer that has not stepped."""
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups  # the same dicts: a schedule of either changes both


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that the closure of an optimizer's step computes; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if an optimizer updates each element from its own gradient and state."""
    return isinstance(optimizer, ELEMENTWISE) or hooks_of(optimizer).is_elementwise


def check_elementwise(inner: Optimizer) -> None:
    """Raise an error if the state of an optimizer cannot be offloaded.

    Raises:
        OffloadError: It does not step element by element, or has stepped.
    """
    name = type(getattr(inner, "inner", inner)).__name__
    if not is_elementwise(inner):
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise OffloadError(
            f"the state of {name} cannot be offloaded: {name} is not known to update each element by itself. Use one "
            f"of {known}"
        )
    if has_stepped(inner):
        raise OffloadError(f"{name} has stepped already: offload the state of a new one, and load a checkpoint into it")
