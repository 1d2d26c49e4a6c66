"""An optimizer whose state, and the float32 masters of 16-bit parameters, are in host memory.

    device    grad 0 | grad 1 | grad 2 ...
    host              | step 0 | step 1 ...
    device                     | rows 0 | rows 1 ...

It steps there with the arithmetic of the wrapped optimizer, on one chunk of neighbouring parameters after the other. If
parameters are on the host themselves nothing is copied, and it steps on them in place.

After ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from dsgraph.compat.autograd import version_of
from dsgraph.inductor_ext.transfers.buffer_pool import BufferPool
from dsgraph.inductor_ext.transfers.lanes import Lane, lane_of
from dsgraph.offload.chunk_sizes import CHUNK_BYTES
from dsgraph.offload.slots import first_of
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.partitioning.rows import distributed_like, own_part
from dsgraph.utils.errors import OffloadError

from .chunks import new_state
from .hooks import WrappedOptimizer, check_elementwise, evaluated
from .moves import FromDevice, FromDisk, InPlace, Move

MASTER = "master"
"""The key of a parameter's master in its state."""

_CPU = torch.device("cpu")
_LOW = (torch.float16, torch.bfloat16)
_FUSED = (optim.Adam, optim.AdamW, optim.SGD)
_CHOICES = ("fused", "foreach", "capturable", "differentiable")  # of how torch steps, which a caller may have made


@dataclass(frozen=True)
class Master:
    """The master of a parameter, which is stepped in its place.

    Attributes:
        value: `[r, *]`, on the host or where the parameter is.
        versions: Versions of the parameter when it last had this value.
    """

    value: Tensor
    versions: tuple[int, int]


class HostOptimizer(WrappedOptimizer):
    """A wrapper that steps an optimizer on the host. Groups are those of the inner optimizer.

    Attributes:
        inner: The optimizer that steps. It holds no state between steps.
        tier: The place of the state.
    """

    tier: ClassVar[str] = "host"

    def __init__(
        self, inner: Optimizer, *, ratio: float = 1.0, pin_memory: bool = True, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Take over an optimizer.

        Args:
            inner: An optimizer of parameters on the CPU or on CUDA that has not stepped.
            ratio: The share of elements whose state is on the host; that of the last parameters is on the device.
            pin_memory: True uses pinned memory for copies to and from CUDA. Without it, copies and steps do not
                overlap.
            chunk_bytes: Bytes of parameters that are copied and stepped together, or one parameter.

        Raises:
            OffloadError: `ratio` is not a share, or the optimizer is not element-wise or has stepped.
        """
        check_elementwise(inner)
        if not 0 < ratio <= 1:
            raise OffloadError(f"ratio is {ratio!r}; it takes a share, above 0 and up to 1")
        super().__init__(inner)
        inner.state = new_state(inner)
        params = [param for group in self.param_groups for param in group["params"]]
        self._on_host = set(params[: first_of([own_part(param).numel() for param in params], ratio)])
        self._chunk_bytes = chunk_bytes
        self._masters: dict[Tensor, Master] = {}
        self._pinned = pin_memory and torch.cuda.is_available()
        self._pool = BufferPool(pinned=self._pinned)
        self._lanes: dict[torch.device, Lane] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            OffloadError: Parameters on disk could not be read or written.
        """
        loss = evaluated(closure)
        chunks = self._chunks()
        leaving: list[Move] = []
        coming = [self._move(param) for param, _ in chunks[0]] if chunks else []
        for number, chunk in enumerate(chunks):
            following = [self._move(param) for param, _ in chunks[number + 1]] if number + 1 < len(chunks) else []
            leaves = [self._leaf(param, move) for (param, _), move in zip(chunk, coming, strict=True)]
            for leaf, move in zip(leaves, coming, strict=True):
                leaf.grad = move.grad().to(leaf)
            states = self._run(chunk, leaves, self.param_groups, [self._state_of(param) for param, _ in chunk])
            for (param, _), leaf, state, move in zip(chunk, leaves, states, coming, strict=True):
                leaf.grad = None
                move.put(leaf)
                self._take_over(param, leaf, state)
            for move in leaving:  # while the device takes this chunk; all at once would hold all in pinned memory
                move.settle()
            leaving, coming = coming, following
        for move in leaving:
            move.settle()
        self._note([param for chunk in chunks for param, _ in chunk])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, of this class or of the inner one.

        Torch would round each number to the parameter's dtype, and move it to its device.
        """
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                found = state_dict["state"][number]
                self.state[param] = {key: v.clone() if isinstance(v, Tensor) else v for key, v in found.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the result of `load_state_dict`."""
        found = dict(state)
        stored = found.pop("state")
        super().__setstate__(found)
        self.inner.param_groups = self.param_groups
        self.state = defaultdict(dict, stored)

    def _chunks(self) -> list[list[tuple[Tensor, int]]]:
        """Return chunks of neighbouring parameters with a gradient, each with its group's number."""
        chunks: list[list[tuple[Tensor, int]]] = []
        room = 0
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    continue
                size = own_part(param).nbytes
                if size > room:
                    chunks.append([])
                    room = self._chunk_bytes
                room -= size
                chunks[-1].append((param, number))
        return chunks

    def _device_of(self, param: Tensor) -> torch.device:
        """Return the device of a parameter's state."""
        return _CPU if param in self._on_host else own_part(param).device

    def _move(self, param: Tensor) -> Move:
        rows = own_part(param)
        if rows.device != self._device_of(param) and rows.numel():
            lane = self._lanes.setdefault(rows.device, lane_of(rows.device))
            return FromDevice(param, lane=lane, pool=self._pool)
        stored = stored_rows(rows)
        return FromDisk(stored) if stored is not None and stored.holds_gradient else InPlace(param)

    def _has_master(self, param: Tensor) -> bool:
        """Return whether a master is stepped in place of the parameter."""
        return own_part(param).device != self._device_of(param) or self._keeps_master(param)

    def _keeps_master(self, param: Tensor) -> bool:
        """Return whether the master is more precise than the parameter, so that it belongs to the state."""
        return param.dtype in _LOW

    def _leaf(self, param: Tensor, move: Move) -> Tensor:
        """Return the tensor that is stepped: the parameter's rows, or its master."""
        kept = self.state[param].get(MASTER) if param in self.state else None
        if not self._has_master(param):
            rows = move.rows()
            if kept is not None:  # of an optimizer that kept one: it says more
                rows.copy_(own_part(self.state[param].pop(MASTER)))
            return rows
        known = self._masters.get(param)
        if kept is not None and not self._is_known(param, kept):
            known = self._new_master(param, own_part(kept))
        elif known is None or (kept is None and self._keeps_master(param)):
            known = self._new_master(param, move.rows())
        elif known.versions != versions_of(param):  # somebody wrote to it; what they left as it was keeps its master
            rows = move.rows().to(known.value.device)
            torch.where(known.value.to(rows.dtype) == rows, known.value, rows.to(known.value.dtype), out=known.value)
        return known.value

    def _is_known(self, param: Tensor, kept: Tensor) -> bool:
        """Return whether a master in the state is the one that was put there, and was not loaded."""
        known = self._masters.get(param)
        return known is not None and own_part(kept).data_ptr() == known.value.data_ptr()

    def _new_master(self, param: Tensor, value: Tensor) -> Master:
        device = self._device_of(param)
        dtype = torch.float32 if param.dtype in _LOW else param.dtype
        pinned = self._pinned and device == _CPU and own_part(param).device != _CPU
        made = torch.empty(own_part(param).shape, dtype=dtype, device=device, pin_memory=pinned)
        self._masters[param] = found = Master(made.copy_(value), versions_of(param))
        return found

    def _run(
        self,
        chunk: Sequence[tuple[Tensor, int]],
        leaves: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        states: Sequence[Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """Step on the leaves of a chunk with the state `states`; return the new state."""
        made = [self._has_master(param) for param, _ in chunk]
        kinds: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        for leaf, (_, number), has_master in zip(leaves, chunk, made, strict=True):
            kinds[number, has_master].append(leaf)
        held = [
            {**groups[number], **(self._how(groups[number]) if has_master else {}), "params": params}
            for (number, has_master), params in kinds.items()
        ]
        with holding(self.inner, held):
            self.inner.state.update({leaf: dict(state) for leaf, state in zip(leaves, states, strict=True) if state})
            self.inner.step()
            return [self.inner.state.get(leaf, {}) for leaf in leaves]

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """Return the state in the form of the inner optimizer."""
        device = self._device_of(param)
        found = {}
        for key, value in self.state.get(param, {}).items():
            is_plain = not isinstance(value, Tensor) or (not value.dim() and device != _CPU)
            if key != MASTER:
                found[key] = value if is_plain else own_part(value).to(device)
        return found

    def _how(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a group; torch's fused kernel is used unless the caller has chosen."""
        chosen = any(group.get(key) for key in _CHOICES) or group.get("foreach") is False or group.get("fused") is False
        return {"fused": True} if isinstance(self.inner, _FUSED) and not chosen else {}

    def _take_over(self, param: Tensor, leaf: Tensor, state: Mapping[str, Any]) -> None:
        kept = {MASTER: leaf} if self._keeps_master(param) else {}
        self.state[param] = {
            key: distributed_like(param, value) if is_large(value) and value.shape == leaf.shape else value
            for key, value in {**state, **kept}.items()
        }

    def empty_state(self, param: Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor of a checkpoint, where the state is, in the dtype in which it is computed."""
        if size != param.shape or not len(size):
            return torch.empty(size, dtype=dtype)
        own = torch.float32 if param.dtype in _LOW else param.dtype
        return distributed_like(param, torch.empty(own_part(param).shape, dtype=own, device=self._device_of(param)))

    def _note(self, params: Sequence[Tensor]) -> None:
        """Note that the parameters are equal to their masters."""
        torch.autograd.graph.increment_version(params)
        for param in params:
            if param in self._masters:
                self._masters[param] = Master(self._masters[param].value, versions_of(param))


def is_large(value: object) -> bool:
    """Return whether a value of the state may be as large as the parameter."""
    return isinstance(value, Tensor) and value.dim() > 0


@contextmanager
def holding(inner: Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let an optimizer hold these groups during the block."""
    own = inner.param_groups
    inner.param_groups = groups
    try:
        yield
    finally:
        inner.param_groups = own
        inner.state = new_state(inner)


def versions_of(param: Tensor) -> tuple[int, int]:
    """Return numbers that change when somebody writes to a parameter."""
    return version_of(param), version_of(own_part(param))
