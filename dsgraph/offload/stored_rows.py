"""Parameters in a file: their rows, followed by the gradient."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from dsgraph.compat.autograd import accumulates, autograd_node, running_backward, version_of
from dsgraph.inductor_ext.transfers.buffer_pool import Buffer
from dsgraph.inductor_ext.transfers.stored import Reload, StoredParameter
from dsgraph.inductor_ext.transfers.transfers import transfers_of
from dsgraph.utils.errors import OffloadError

from .slots import SlotFile
from .stored_tensor import StoredTensor

_CPU = torch.device("cpu")
_MANY = 2  # reads: more than the one whose gradient is the whole gradient
WRITING_BYTES = 64 * 2**20
"""Bytes of gradients that may wait to be written; a caller that adds more waits for the oldest."""


class ParameterFile:
    """A file with places for the rows of parameters and for their gradients."""

    def __init__(self, row_bytes: Sequence[int], *, below: Path) -> None:
        """Reserve the file's space on disk.

        Args:
            row_bytes: Bytes of the rows of each parameter.
            below: A folder on the disk.

        Raises:
            OffloadError: The folder cannot be used, or the disk has too few bytes free.
        """
        self.slots = SlotFile([size for each in row_bytes for size in (each, each)], below=below, name="parameters")
        self._writing: list[tuple[Future[None], int]] = []
        self._lock = Lock()  # a backward stores gradients while an optimizer's thread stores rows

    def place(self, number: int) -> StoredRows:
        """Return the place of the rows of a parameter, which is empty."""
        return StoredRows(self, 2 * number)

    def write(self, slot: int, buffer: Buffer) -> Future[None]:
        """Start to write a slot; wait first if too many bytes are being written."""
        with self._lock:
            self._writing = [item for item in self._writing if not item[0].done()]
            while self._writing and buffer.size + sum(size for _, size in self._writing) > WRITING_BYTES:
                self._writing.pop(0)[0].result()
            future = self.slots.write(slot, buffer)
            self._writing.append((future, buffer.size))
        return future


class StoredRows(StoredParameter):
    """Rows of a parameter in a file, and the gradient beside them.

    Other code reads and writes `rows` and `grad`, memory that is mapped from the file: the kernel loads pages as they
    are touched, and may drop them at any time. Accesses in every step avoid that and read or write the whole slot:
    `start`, `add_gradient`, `read`, `write_rows`.

    Attributes:
        rows: `[r, *]`, mapped, once there are any.
        grad: `[r, *]`, mapped.
        when_arrived: Called during a backward when the complete gradient is stored, and the backward no longer reads
            the rows. It is not called if that is unknown: for a parameter that several graphs, or eager code, read.
        held_for: Why the rows must not be read; empty if they may.
        stepped_during_backward: True if an optimizer has stepped on them during a backward.
    """

    rows: Tensor
    grad: Tensor

    def __init__(self, file: ParameterFile, slot: int) -> None:
        """Create an empty place.

        Args:
            file: The file.
            slot: The slot of the rows; the gradient has the next one.
        """
        self._file, self._slot = file, slot
        self._maps = [file.slots.map(number) for number in (slot, slot + 1)]
        self._writing: Future[None] | None = None
        self._param: weakref.ref[DTensor] | None = None
        self._node: Any = None
        self._has_arrived = False
        self._given = 0  # version of the parameter's gradient as it arrived: a DTensor's part has none
        self._reads = 0  # for forwards, since a gradient arrived last
        self._reading_ahead: list[Future[Buffer]] = []
        self.when_arrived: Callable[[], None] | None = None
        self.held_for = ""
        self.stepped_during_backward = False

    @property
    def file(self) -> SlotFile:
        """The file of its bytes."""
        return self._file.slots

    @property
    def stored(self) -> StoredTensor:
        """The place of the rows, to read and write parts of them."""
        return StoredTensor(self.file, self._slot, 0, self.rows.dtype, self.rows.shape)

    def fill(self, rows: Tensor) -> Tensor:
        """Store the first rows, a contiguous tensor on the CPU; return them in mapped memory."""
        self.rows, self.grad = (_tensor_over(memory, rows) for memory in self._maps)
        self.write_rows(rows).result()
        if rows.numel():
            transfers_of(_CPU).keep(self.rows, self)
        return self.rows

    def belongs_to(self, param: DTensor) -> None:
        """Watch the gradient of the parameter with these rows."""
        if self._param is not None and self._param() is param and (self._node is not None or not param.requires_grad):
            return
        self._param = weakref.ref(param)
        if param.requires_grad:
            weak = weakref.ref(self)
            self._node = autograd_node(param)  # ops run below autograd, where nothing tells it
            param.register_post_accumulate_grad_hook(lambda _: _accumulated(weak))

    @override
    def start(self) -> Reload:
        self.refuse_held()
        self._reads += running_backward() < 0
        reading = self._file.slots.read(self._slot)
        self._reading_ahead = [*(future for future in self._reading_ahead if not future.done()), reading]
        return _Fetch(self._file.slots, reading, self._forget)

    def _forget(self, reading: Future[Buffer]) -> None:
        """Release a finished read, and so its buffer: the pool may free its memory."""
        self._reading_ahead = [future for future in self._reading_ahead if future is not reading]

    def note_eager_read(self) -> None:
        """Note that code outside compiled graphs reads the rows: their last read is unknown then."""
        self.refuse_held()
        self._reads += _MANY

    def forget_reads(self) -> None:
        """Forget the reads so far: they have no backward any more."""
        self._reads = 0

    def refuse_held(self) -> None:
        """Refuse an access that is too late, or too early.

        Raises:
            OffloadError: The rows are held.
        """
        if self.held_for:
            raise OffloadError(
                f"a parameter of shape {list(self.rows.shape)} in {self._file.slots.path} {self.held_for}"
            )

    @override
    def add_gradient(self, grad: Tensor) -> None:
        self.refuse_held()
        param = self._param() if self._param is not None else None
        if param is None or not accumulates(self._node):
            raise OffloadError(
                "the gradient of a parameter on disk is only written to its .grad: torch.autograd.grad and "
                "backward(inputs=...) are not supported; call backward() without inputs"
            )
        adds = self._has_arrived or param.grad is not None
        buffer = self._file.slots.take(self._slot + 1)
        view = view_in(buffer, grad)
        view.copy_(grad)
        if adds:
            with self._reading(self._slot + 1) as earlier:
                view.add_(view_in(earlier, grad))
        self._writing = self._file.write(self._slot + 1, buffer)
        self._has_arrived = True
        param.grad = None  # so that autograd puts there what it is given, and adds nothing
        if self.when_arrived is not None and self._reads == 1:
            self.when_arrived()

    @property
    def holds_gradient(self) -> bool:
        """True if the parameter's gradient is here, and nowhere else."""
        param = self._param() if self._param is not None else None
        grad = param.grad if param is not None else None
        return isinstance(grad, DTensor) and grad.to_local().data_ptr() == self.grad.data_ptr()

    @property
    def has_gradient(self) -> bool:
        """True if there is a gradient here: also during the backward that has stored it."""
        return self._has_arrived or self.holds_gradient

    @property
    def holds_gradient_as_stored(self) -> bool:
        """True if nobody has written to the parameter's gradient since it arrived."""
        param = self._param() if self._param is not None else None
        grad = param.grad if param is not None else None
        return self.holds_gradient and grad is not None and version_of(grad) == self._given

    def read(self) -> tuple[Future[Buffer], Future[Buffer]]:
        """Start to read the rows and the gradient, each into a buffer that the caller gives back."""
        self._settle()
        return self._file.slots.read(self._slot), self._file.slots.read(self._slot + 1)

    def write_rows(self, rows: Tensor) -> Future[None]:
        """Start to store other rows; they may be overwritten afterwards."""
        buffer = self._file.slots.take(self._slot)
        view_in(buffer, rows).copy_(rows)
        return self.write_buffer(buffer)

    def write_buffer(self, buffer: Buffer) -> Future[None]:
        """Start to store the rows in a buffer of `read`; then the buffer is given back."""
        for reading in self._reading_ahead:
            reading.exception()  # until it is through; who asked for it hears of an error
        return self._file.write(self._slot, buffer)

    def give_back(self, *buffers: Buffer) -> None:
        """Return buffers of `read` to the pool."""
        for buffer in buffers:
            self._file.slots.give_back(buffer)

    def accumulated(self) -> None:
        """Set the parameter's gradient to the mapped one, after autograd has put something into its `.grad`."""
        param = self._param() if self._param is not None else None
        found = param.grad if param is not None else None
        if param is None or not isinstance(found, DTensor):
            return
        self._reads = 0
        local = found.to_local()
        if local.data_ptr() == self.grad.data_ptr():
            return  # autograd has added to it in place
        self._settle()
        if not self._has_arrived:
            self.grad.copy_(local)
        elif any(local.stride()) and local.any():  # of code outside compiled graphs, in the same backward
            # What a graph returns in place of a stored gradient is an expanded zero, which torch 2.14 and newer copy.
            self.refuse_held()
            self.grad.add_(local)
        param.grad = DTensor.from_local(
            self.grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        self._given = version_of(param.grad)
        self._has_arrived = False  # last: an optimizer's thread may ask `has_gradient` at any time

    def drop_pages(self) -> None:
        """Return the memory of mapped pages to the kernel. Written data is kept."""
        for memory in self._maps:
            memory.flush()
            memory.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def _reading(self, slot: int) -> Iterator[Buffer]:
        self._settle()
        buffer = self._file.slots.read(slot).result()
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def _settle(self) -> None:
        """Wait for the gradient's write."""
        writing = self._writing
        if writing is not None:
            writing.result()
            self._writing = None


class _Fetch(Reload):
    """A running read of rows into memory."""

    def __init__(
        self, slots: SlotFile, reading: Future[Buffer], when_through: Callable[[Future[Buffer]], None]
    ) -> None:
        self._slots, self._reading, self._when_through = slots, reading, when_through

    @override
    def finish(self, result: Tensor) -> None:
        buffer = self._reading.result()
        result.copy_(buffer.data[: result.numel()])
        self._when_through(self._reading)
        self._slots.give_back(buffer)

    @override
    def give_up(self) -> None:
        self._reading.add_done_callback(self._give_back)

    def _give_back(self, reading: Future[Buffer]) -> None:
        self._when_through(reading)
        if reading.exception() is None:
            self._slots.give_back(reading.result())


def stored_rows(rows: Tensor) -> StoredRows | None:
    """Return the place of a parameter with these rows; None if they are in memory."""
    found = transfers_of(rows.device).parameter(rows) if rows.device.type == "cpu" and rows.numel() else None
    return found if isinstance(found, StoredRows) else None


def _accumulated(stored: weakref.ref[StoredRows]) -> None:
    living = stored()
    if living is not None:
        with torch.no_grad():
            living.accumulated()


def _tensor_over(memory: mmap.mmap, like: Tensor) -> Tensor:
    if not like.numel():  # a rank without rows
        return torch.empty_like(like)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)


def view_in(buffer: Buffer, like: Tensor) -> Tensor:
    """Return the beginning of a buffer as a contiguous tensor of the shape and dtype of `like`."""
    return buffer.data[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
