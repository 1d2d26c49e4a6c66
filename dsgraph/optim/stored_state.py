"""An optimizer's state by parameter; large tensors are stored in chunks on disk or in memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from dsgraph.inductor_ext.transfers.buffer_pool import Buffer, rounded
from dsgraph.offload.slots import SlotFile, first_of
from dsgraph.offload.stored_tensor import StoredTensor
from dsgraph.partitioning.rows import distributed_like, own_part

from .chunks import Chunk, StateLocation

_T = TypeVar("_T")


class ChunkStore:
    """A buffer for each chunk: the first ones are stored in a file, the others stay in memory.

    Attributes:
        file: The file.
    """

    def __init__(self, sizes: Sequence[int], *, ratio: float, folder: Path) -> None:
        """Reserve the space on disk and in memory.

        Args:
            sizes: Bytes of each chunk.
            ratio: The share of all bytes in the file, rounded up to full chunks.
            folder: A folder on the disk.

        Raises:
            OffloadError: See `SlotFile`.
        """
        sizes = [rounded(size) for size in sizes]
        on_disk = first_of(sizes, ratio)
        self.file = SlotFile(sizes[:on_disk], below=folder, name="optimizer-state")
        self._on_disk = on_disk
        self._kept = [Buffer(torch.empty(size, dtype=torch.uint8), size) for size in sizes[on_disk:]]

    def _kept_one(self, number: int) -> Buffer | None:
        return None if number < self._on_disk else self._kept[number - self._on_disk]

    def take(self, number: int) -> Buffer:
        """Return a buffer of a chunk, with undefined contents."""
        return self._kept_one(number) or self.file.take(number)

    def read(self, number: int) -> Future[Buffer]:
        """Start to read a chunk into a buffer, which must be given back or written."""
        kept = self._kept_one(number)
        return self.file.read(number) if kept is None else _done(kept)

    def write(self, number: int, buffer: Buffer) -> Future[None]:
        """Start to write a chunk's buffer, which is then given back."""
        return self.file.write(number, buffer) if self._kept_one(number) is None else _done(None)

    def memory(self, number: int) -> mmap.mmap | memoryview:
        """Return a chunk as memory: mapped from the file, see `SlotFile.map_copy`, or the memory in which it stays."""
        kept = self._kept_one(number)
        return self.file.map_copy(number) if kept is None else kept.view()

    def give_back(self, number: int, buffer: Buffer) -> None:
        """Return a buffer of `take` or `read` to the pool."""
        if self._kept_one(number) is None:
            self.file.give_back(buffer)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory for state: that of the chunks in memory, and the buffers for the others."""
        return self.file.buffer_bytes + sum(buffer.size for buffer in self._kept)


class StoredState(MutableMapping[Tensor, dict[str, Any]]):
    """State by parameter: tensors of its size in a file, everything else in memory.

    Tensors that are read share memory with the stored ones, like the state of torch's optimizers: nothing is copied,
    and a tensor that is kept over a step has the values after the step. Tensors in the file are mapped from it, so that
    the kernel loads and drops their pages; writes to them are lost. Assigned tensors are copied.
    """

    def __init__(self, chunks: Sequence[Chunk], file: ChunkStore) -> None:
        self._chunks, self._file = chunks, file
        self._where = {param: (at, of) for at, chunk in enumerate(chunks) for of, param in enumerate(chunk.params)}
        self._small: dict[Tensor, dict[str, Any]] = {}
        self._ahead: dict[int, Future[Buffer]] = {}
        self._maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address of a tensor
        self._mapped: WeakKeyDictionary[mmap.mmap, dict[int, StoredTensor]] = WeakKeyDictionary()

    def stored(self, value: Tensor) -> StoredTensor | None:
        """Return the place of a tensor that was read here and is mapped from the file; None for any other tensor."""
        memory = self._maps.get(value.data_ptr())
        return None if memory is None else self._mapped[memory][value.data_ptr()]

    def tensors(self, param: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a parameter's state in its chunk, by key; undefined if none was stored yet."""
        number, of = self._where[param]
        memory, shape, found = self._file.memory(number), own_part(param).shape, dict[str, Tensor]()
        for place in self._chunks[number].places[of]:
            local = _tensor_in(memory, place).view(shape)
            if isinstance(memory, mmap.mmap) and place.size:
                stored = StoredTensor(self._file.file, number, place.start, place.dtype, shape)
                self._maps[local.data_ptr()] = memory
                self._mapped.setdefault(memory, {})[local.data_ptr()] = stored
            found[place.key] = distributed_like(param, local)
        return found

    def take_rest(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Note that the tensors of a parameter's state were written to their places, and store the rest of it."""
        number, of = self._where[param]
        kept = {place.key for place in self._chunks[number].places[of]}
        self._small[param] = {key: _copied(value) for key, value in state.items() if key not in kept}

    def small(self, param: Tensor) -> dict[str, Any] | None:
        """Return the part of a parameter's state in memory; None if there is no state yet."""
        return self._small.get(param)

    def start_read(self, number: int) -> Future[Buffer]:
        """Return a buffer with the state of a chunk; undefined if none was stored yet."""
        if number in self._ahead:
            return self._ahead.pop(number)
        if any(param in self._small for param in self._chunks[number].params):
            return self._file.read(number)
        return _done(self._file.take(number))

    def read_ahead(self, number: int) -> None:
        """Start the next `start_read` of a chunk now."""
        if number not in self._ahead:
            self._ahead[number] = self.start_read(number)

    def take_over(self, number: int, buffer: Buffer, states: Sequence[Mapping[str, Any]]) -> None:
        """Copy the state of a chunk after a step into its buffer."""
        chunk = self._chunks[number]
        for param, places, state in zip(chunk.params, chunk.places, states, strict=True):
            if state:
                self._put(param, places, state, buffer)

    def _put(self, param: Tensor, places: Sequence[StateLocation], state: Mapping[str, Any], buffer: Buffer) -> None:
        rest = dict(state)
        for place in places:
            value = own_part(rest.pop(place.key))
            view = place.view(buffer, value)
            if view.data_ptr() != value.data_ptr():
                view.copy_(value)
        self._small[param] = rest

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        return {**self._small[param], **self.tensors(param)}

    def __setitem__(self, param: Tensor, state: dict[str, Any]) -> None:
        number, of = self._where[param]
        self._forget_read(number)
        # Always the stored one: the state of other parameters of the chunk may be mapped, and set from there next.
        buffer = self._file.read(number).result()
        places = self._chunks[number].places[of]
        self._put(param, places, state, buffer)
        self._small[param] = {key: _copied(value) for key, value in self._small[param].items()}
        self._file.write(number, buffer).result()
        for place in places:
            memory = self._maps.get(own_part(state[place.key]).data_ptr())
            if memory is not None:
                memory.madvise(mmap.MADV_DONTNEED)

    def __delitem__(self, param: Tensor) -> None:
        del self._small[param]

    def clear(self) -> None:
        """Forget all state."""
        for number in list(self._ahead):
            self._forget_read(number)
        self._small.clear()

    def _forget_read(self, number: int) -> None:
        if number in self._ahead:
            self._file.give_back(number, self._ahead.pop(number).result())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._small)

    def __len__(self) -> int:
        return len(self._small)


def _done(value: _T) -> Future[_T]:
    found: Future[_T] = Future()
    found.set_result(value)
    return found


def _tensor_in(memory: mmap.mmap | memoryview, place: StateLocation) -> Tensor:
    """Return the elements of a place as a tensor `[n]` whose storage is no larger: saving it copies nothing."""
    if not place.size:
        return torch.empty(0, dtype=place.dtype)
    count = place.size // place.dtype.itemsize
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
