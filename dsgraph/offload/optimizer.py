"""An optimizer whose state lies on disk, and comes into memory some parameters at a time.

    step    read chunk 0 | read chunk 1 | read chunk 2 ...
                         | step chunk 0 | step chunk 1 ...
                                        | write chunk 0 ...

The arithmetic is that of the optimizer that is wrapped: it steps on one chunk of its parameters after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsgraph.errors import OffloadError
from dsgraph.inductor_ext.transfers.buffers import Buffer
from dsgraph.sharding.rows import own_part
from dsgraph.tiers.slots import SlotFile
from dsgraph.tiers.stored_rows import ReadRows, stored_rows

CHUNK_BYTES = 32 * 2**20
"""Bytes of state that are read, used and written together. Up to three chunks are in memory at once."""

# They compute each element of a parameter by itself: on rows, and some parameters after others, it is the same.
ELEMENTWISE = (
    *(optim.Adadelta, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
)
_ALIGNMENT = 64  # bytes between tensors of a slot, as vector instructions like it


@dataclass(frozen=True)
class Place:
    """Where a tensor of state lies: in the slot of its chunk, `size` bytes from `start`."""

    key: str
    dtype: torch.dtype
    start: int
    size: int

    def view(self, buffer: Buffer, like: Tensor) -> Tensor:
        """The tensor in a buffer of its slot, of the shape of `like`."""
        return buffer.data[self.start : self.start + self.size].view(self.dtype).view(like.shape)


@dataclass(frozen=True)
class Chunk:
    """Parameters that are stepped together: each with its group's number, and the places of its state."""

    params: tuple[Tensor, ...]
    groups: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]
    size: int


class OptimizerOnDisk(Optimizer):
    """Steps another optimizer, whose state of the size of parameters lies in a file. Groups are the other's own.

    Attributes:
        inner: The optimizer that steps. It holds no state between steps.
        state: Reads and writes the file: what it gives is a copy, and what is set is stored.
    """

    def __init__(self, inner: Optimizer, *, folder: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Takes over an optimizer, and reserves the disk's bytes for its state.

        Args:
            inner: Of parameters on the CPU; it has not stepped.
            folder: On the disk.
            chunk_bytes: See `CHUNK_BYTES`; a parameter whose state takes more is a chunk of its own.

        Raises:
            OffloadError: Not an optimizer of elements, parameters elsewhere, or the disk has too few bytes free.
        """
        params = [param for group in inner.param_groups for param in group["params"]]
        _check(inner, params)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups  # the same dicts: a schedule of either changes both
        self.chunks = _chunks(inner, chunk_bytes)
        self._file = SlotFile([chunk.size for chunk in self.chunks], below=folder, name="optimizer-state")
        self._stored = _StoredState(self.chunks, self._file)
        self._failure: Exception | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return sum(self._file.sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory through which state passes."""
        return self._file.buffer_bytes

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """See the class."""
        return self._stored

    @state.setter
    def state(self, value: Mapping[Tensor, dict[str, Any]]) -> None:
        if "_stored" in self.__dict__:  # torch's constructor sets an empty one first
            self._stored.clear()
            for param, found in value.items():
                self._stored[param] = found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes what `load_state_dict` has read."""
        found = dict(state)
        stored = found.pop("state")
        super().__setstate__(found)
        self.inner.param_groups = self.param_groups
        self.state = stored

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Raises:
            OffloadError: The file could not be read or written. Some parameters may be updated and others not; every
                later step is refused.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._failure is not None:
            raise OffloadError(f"an earlier step failed, and state is lost: load a checkpoint ({self._failure})")
        try:
            self._step_chunks([at for at, chunk in enumerate(self.chunks) if _has_gradients(chunk)])
        except OffloadError as error:
            self._failure = error
            raise
        stepped = [param for chunk in self.chunks for param in chunk.params if param.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        return loss

    def _step_chunks(self, numbers: Sequence[int]) -> None:
        writing: Sequence[Future[None]] = ()
        reading = self._start_read(numbers[0]) if numbers else None
        for place, number in enumerate(numbers):
            assert reading is not None
            buffer, parameters = reading.result()
            _wait_for(writing)
            reading = self._start_read(numbers[place + 1]) if place + 1 < len(numbers) else None
            with self._holding(number, buffer, parameters) as leaves:
                self.inner.step()
                self._stored.take_over(number, buffer, [self.inner.state[leaf] for leaf in leaves])
            writing = [self._file.write(number, buffer), *(item.write() for item in parameters.values())]
        _wait_for(writing)

    def _start_read(self, number: int) -> _Reading:
        """Starts to read the state of a chunk, and those of its parameters that lie on disk as well."""
        found = {param: stored_rows(own_part(param)) for param in self.chunks[number].params}
        on_disk = {param: ReadRows(rows) for param, rows in found.items() if rows is not None and rows.holds_gradient}
        return _Reading(self._stored.start_read(number), on_disk)

    @contextmanager
    def _holding(self, number: int, buffer: Buffer, parameters: Mapping[Tensor, ReadRows]) -> Iterator[list[Tensor]]:
        """Inside, the inner optimizer holds a chunk alone: this rank's rows, with gradients and state."""
        chunk, groups = self.chunks[number], self.inner.param_groups
        leaves = [
            parameters[param].rows() if param in parameters else own_part(param).detach() for param in chunk.params
        ]
        for leaf, param, places in zip(leaves, chunk.params, chunk.places, strict=True):
            if param in parameters:
                leaf.grad = parameters[param].grad()
            else:
                leaf.grad = None if param.grad is None else own_part(param.grad)
            known = self._stored.small(param)
            if known is not None:
                self.inner.state[leaf] = {**known, **{place.key: place.view(buffer, leaf) for place in places}}
        self.inner.param_groups = [
            {**group, "params": [leaf for leaf, of in zip(leaves, chunk.groups, strict=True) if of == at]}
            for at, group in enumerate(groups)
        ]
        try:
            yield leaves
        finally:
            self.inner.param_groups = groups
            self.inner.state = defaultdict(dict)


@dataclass(frozen=True)
class _Reading:
    """What of a chunk is on its way into memory."""

    state: Future[Buffer]
    parameters: Mapping[Tensor, ReadRows]

    def result(self) -> tuple[Buffer, Mapping[Tensor, ReadRows]]:
        """All of it, when it is there."""
        return self.state.result(), self.parameters


def _wait_for(writing: Sequence[Future[None]]) -> None:
    for future in writing:
        future.result()


class _StoredState(MutableMapping[Tensor, dict[str, Any]]):
    """State by parameter: tensors of its size in a file, everything else in memory."""

    def __init__(self, chunks: Sequence[Chunk], file: SlotFile) -> None:
        self._chunks, self._file = chunks, file
        self._where = {param: (at, of) for at, chunk in enumerate(chunks) for of, param in enumerate(chunk.params)}
        self._small: dict[Tensor, dict[str, Any]] = {}

    def small(self, param: Tensor) -> dict[str, Any] | None:
        """What of a parameter's state is in memory; None where there is none at all yet."""
        return self._small.get(param)

    def start_read(self, number: int) -> Future[Buffer]:
        """A buffer with the state of a chunk; with anything, where none was stored yet."""
        if any(param in self._small for param in self._chunks[number].params):
            return self._file.read(number)
        found: Future[Buffer] = Future()
        found.set_result(self._file.take(number))
        return found

    def take_over(self, number: int, buffer: Buffer, states: Sequence[Mapping[str, Any]]) -> None:
        """Sees to it that a buffer holds the state of a chunk, as a step has left it."""
        chunk = self._chunks[number]
        for param, places, state in zip(chunk.params, chunk.places, states, strict=True):
            if state:
                self._put(param, places, state, buffer)

    def _put(self, param: Tensor, places: Sequence[Place], state: Mapping[str, Any], buffer: Buffer) -> None:
        rest = dict(state)
        for place in places:
            value = own_part(rest.pop(place.key))
            view = place.view(buffer, value)
            if view.data_ptr() != value.data_ptr():
                view.copy_(value)
        self._small[param] = rest

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        number, of = self._where[param]
        small = self._small[param]
        buffer = self._file.read(number).result()
        local = own_part(param)
        found = {
            place.key: _like(param, place.view(buffer, local).clone()) for place in self._chunks[number].places[of]
        }
        self._file.give_back(buffer)
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in small.items()}
        return {**copied, **found}

    def __setitem__(self, param: Tensor, state: dict[str, Any]) -> None:
        number, of = self._where[param]
        buffer = self.start_read(number).result()
        self._put(param, self._chunks[number].places[of], state, buffer)
        self._file.write(number, buffer).result()

    def __delitem__(self, param: Tensor) -> None:
        del self._small[param]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._small)

    def __len__(self) -> int:
        return len(self._small)


def _check(inner: Optimizer, params: Sequence[Tensor]) -> None:
    name = type(inner).__name__
    if not isinstance(inner, ELEMENTWISE):
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise OffloadError(
            f"the state of {name} cannot be offloaded: it is not known to step element by element: {known} are"
        )
    if inner.state:
        raise OffloadError(f"{name} has stepped already: offload the state of a new one, and load a checkpoint into it")
    elsewhere = next((param for param in params if own_part(param).device.type != "cpu"), None)
    if elsewhere is not None:
        raise OffloadError(
            f"{name} holds parameters on {elsewhere.device.type}; state can lie on disk for those on the CPU alone"
        )


def _has_gradients(chunk: Chunk) -> bool:
    return any(param.grad is not None for param in chunk.params)


def _chunks(inner: Optimizer, chunk_bytes: int) -> list[Chunk]:
    """Neighbouring parameters, with the places of what the optimizer keeps of each."""
    chunks: list[Chunk] = []
    held: list[tuple[Tensor, int, tuple[Place, ...]]] = []
    start = 0
    for number, group in enumerate(inner.param_groups):
        kept = {dtype: _kept(inner, group, dtype) for dtype in {param.dtype for param in group["params"]}}
        for param in group["params"]:
            places, end = _places(kept[param.dtype], own_part(param).numel(), start)
            if held and end > chunk_bytes:
                chunks.append(_chunk(held, start))
                held = []
                places, end = _places(kept[param.dtype], own_part(param).numel(), 0)
            held.append((param, number, places))
            start = end
    return [*chunks, _chunk(held, start)] if held else chunks


def _chunk(held: Sequence[tuple[Tensor, int, tuple[Place, ...]]], size: int) -> Chunk:
    params, groups, places = zip(*held, strict=True)
    return Chunk(params, groups, places, size)


def _places(kept: Mapping[str, torch.dtype], elements: int, start: int) -> tuple[tuple[Place, ...], int]:
    found = []
    for key, dtype in kept.items():
        size = elements * dtype.itemsize
        found.append(Place(key, dtype, start, size))
        start = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
    return tuple(found), start


def _kept(inner: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What an optimizer keeps of a parameter's size, seen by letting it step on a small one of the same group."""
    groups = inner.param_groups
    probe = torch.zeros(2, 3, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    inner.param_groups = [{**group, "params": [probe]}]
    try:
        with torch.no_grad():
            inner.step()
        state = inner.state[probe]
        return {
            key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.shape == probe.shape
        }
    finally:
        inner.param_groups = groups
        inner.state = defaultdict(dict)


def _like(param: Tensor, local: Tensor) -> Tensor:
    """This rank's part as a tensor that is distributed as the parameter is."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
