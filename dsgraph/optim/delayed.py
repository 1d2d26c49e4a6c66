"""The delayed update of ZeRO-Offload: the host steps while the device computes with the parameters of a step before.

device   gradients 1 | gradients 2      | gradients 3      |
host                 | step 1           | step 2           |
device               | parameters 0     | parameters 1     |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.partitioning.rows import distributed_like, own_part

from .hooks import evaluated
from .host_optimizer import MASTER, HostOptimizer, versions_of
from .moves import InPlace, Move

_WARNING = (
    "delayed_update: every gradient is of parameters that lack the update of the step before, so that training is not "
    "the same as without; leave it off for the first steps, and see whether the loss goes down as well"
)


class DelayedHostOptimizer(HostOptimizer):
    """An optimizer that computes an update during the next step's forward and backward, and applies it at their end.

    Change groups, by a schedule for example, through this optimizer and not through the inner one.

    Attributes:
        state: The state; reading it waits for the running update.
    """

    def __init__(self, inner: Optimizer, *, pin_memory: bool = True) -> None:
        """Take over an optimizer, and warn; see `HostOptimizer`. All of the state is on the host."""
        self._under_way: Future[list[dict[str, Any]]] | None = None
        self._stepping: list[tuple[Tensor, Tensor]] = []
        self._due: set[Tensor] = set()
        super().__init__(inner, pin_memory=pin_memory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsgraph-delayed-update")
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(_WARNING, stacklevel=3)

    @property
    def state(self) -> Any:
        """See the class."""
        self._wait()
        return self._own_state

    @state.setter
    def state(self, value: Any) -> None:
        self._own_state = value

    def close(self) -> None:
        """End the thread after the running update; no step is possible afterwards."""
        self._thread.shutdown(wait=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the update of the step before, and start to compute that of this step."""
        loss = evaluated(closure)
        self._apply()
        chunk = [pair for pairs in self._chunks() for pair in pairs]
        moves = [self._move(param) for param, _ in chunk]
        leaves = [self._leaf(param, move) for (param, _), move in zip(chunk, moves, strict=True)]
        for leaf, move in zip(leaves, moves, strict=True):
            leaf.grad = move.grad().to(leaf.dtype, copy=True)
            move.settle()
        states = [self._state_of(param) for param, _ in chunk]
        groups = [dict(group) for group in self.param_groups]  # as they are now: a schedule changes them
        self._stepping = [(param, leaf) for (param, _), leaf in zip(chunk, leaves, strict=True)]
        self._under_way = self._thread.submit(self._run, chunk, leaves, groups, states)
        return loss

    def finish(self) -> None:
        """Apply the running update, after the last step for example."""
        with torch.no_grad():
            self._apply()

    def _wait(self) -> None:
        """Wait for the running update, and take over its state."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        states = under_way.result()
        for (param, leaf), state in zip(self._stepping, states, strict=True):
            leaf.grad = None
            self._take_over(param, leaf, state)
        self._due |= {param for param, _ in self._stepping}

    def _apply(self) -> None:
        """Copy masters to their parameters, except those that somebody else has written to since."""
        applied = []
        for param, state in self.state.items():
            kept, known = state.get(MASTER), self._masters.get(param)
            if kept is None:
                continue
            if not self._is_known(param, kept):  # loaded, perhaps during a delay
                known = self._new_master(param, own_part(kept))
                state[MASTER] = distributed_like(param, known.value)
            elif known is None or param not in self._due or known.versions != versions_of(param):
                continue
            own_part(param).detach().copy_(known.value)
            applied.append(param)
        self._note(applied)
        self._due = set()

    def _move(self, param: Tensor) -> Move:
        is_here = own_part(param).device == self._device_of(param)
        return InPlace(param) if is_here else super()._move(param)

    def _has_master(self, param: Tensor) -> bool:
        return True

    def _keeps_master(self, param: Tensor) -> bool:
        return True
