"""All transfers of one device of this process: stored tensors, and running transfers."""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property, partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from .buffer_pool import BufferPool
from .errors import TransferError
from .folder import PrivateFolder, usual_root
from .lanes import lane_of
from .stored import Reload, Stored, StoredOnDisk, StoredOnHost, StoredParameter

TIERS = ("host", "disk")

WRITING_BYTES = 256 * 2**20
"""Bytes that may wait to be written to disk; a caller that adds more waits for the oldest."""

_THREADS = 4  # that read and write files


class _Ticket(ctypes.c_int64):
    """The memory of a handle. It owns the stored bytes, so that both are freed together."""

    stored: Stored


class Transfers:
    """Transfers of tensors of one device out of its memory and back.

    `store` returns a handle: a tensor of one number on the CPU, whose memory owns the stored bytes. For autograd and
    compilers it is an ordinary tensor, and it needs no explicit release: when the last tensor over that memory is
    freed, because a backward has ended, a graph was freed or a step was abandoned, the bytes are freed as well. Until
    then they can be read any number of times (`retain_graph`). A copy of a handle is not a handle.

    Attributes:
        host: The pool of host memory.
        staging: The pool of buffers that files are written from and read to.
    """

    def __init__(self, device: torch.device, *, root: Path | None = None, writing_bytes: int = WRITING_BYTES) -> None:
        """Prepare transfers; files and threads are created when they are first needed.

        Args:
            device: The device.
            root: The parent of the folder of files; by default in the folder for temporary files.
            writing_bytes: See `WRITING_BYTES`.
        """
        self._device = device
        pinned = device.type == "cuda"
        self.host, self.staging = BufferPool(pinned=pinned), BufferPool(pinned=pinned)
        self._lane = lane_of(device)
        self._root = root or usual_root()
        self._numbers = count()
        self._parameters: weakref.WeakValueDictionary[int, StoredParameter] = weakref.WeakValueDictionary()
        self._tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
        self._pending: dict[int, tuple[weakref.ref[Tensor], Reload]] = {}  # address of a result -> its transfer
        self._writing: deque[tuple[Future[None], weakref.ref[StoredOnDisk], int]] = deque()
        self._writing_bytes = writing_bytes

    @cached_property
    def folder(self) -> Path:
        """The folder of this process's files, which is removed when the process ends."""
        folder = PrivateFolder(self._root)
        atexit.register(folder.remove)
        return folder.path

    @property
    def pending(self) -> int:
        """Number of results in transfer that were not waited for."""
        return len(self._pending)

    def store(self, tensor: Tensor, tier: str) -> Tensor:
        """Start to store a tensor.

        Args:
            tensor: A dense tensor, in any order of dimensions: its elements fill their memory without gaps or overlaps.
            tier: "host" or "disk".

        Returns:
            `[1]` of int64 on the CPU, the handle.

        Raises:
            TransferError: An earlier tensor could not be written.
        """
        self._check_writes()
        source = _bytes_of(tensor)
        return self._handle(self._store_on_disk(source) if tier == "disk" else self._store_on_host(source, tier))

    def leave(self, handle: Tensor) -> Tensor:
        """Allow the source to be overwritten from now on; return another handle of the same bytes."""
        stored = self._stored(handle)
        stored.leave()
        return self._handle(stored)

    def reload(self, handle: Tensor, result: Tensor) -> None:
        """Start to fill `result`, which has the stored tensor's shape, strides and dtype.

        Raises:
            TransferError: Nothing is stored with that handle.
        """
        self._check_writes()
        key = result.data_ptr()
        reload = self._stored(handle).start(_bytes_of(result))
        self._pending[key] = weakref.ref(result, partial(self._give_up, key)), reload

    def keep(self, rows: Tensor, stored: StoredParameter) -> None:
        """Let ops find the storage of a parameter, by the address of its rows, as long as `stored` is alive."""
        self._parameters[rows.data_ptr()] = stored

    def parameter(self, rows: Tensor) -> StoredParameter | None:
        """Return the storage of a parameter with these rows; None if they are in memory."""
        return self._parameters.get(rows.data_ptr())

    def fetch(self, rows: Tensor) -> Tensor:
        """Start to read a parameter; return `[1]` of int64, for `take`.

        Raises:
            TransferError: The parameter is not stored.
        """
        handle = torch.zeros(1, dtype=torch.int64)
        key = handle.data_ptr()
        self._pending[key] = weakref.ref(handle, partial(self._give_up, key)), self.stored_parameter(rows).start()
        return handle

    def take(self, handle: Tensor, result: Tensor) -> None:
        """Fill `result`, of the parameter's shape, contiguous, with the read values.

        Raises:
            TransferError: It could not be read, or nothing was requested with that handle.
        """
        found = self._pending.pop(handle.data_ptr(), None)
        if found is None:
            raise TransferError("a parameter was taken that no fetch has started to read, or that was taken already")
        found[1].finish(_bytes_of(result))

    def stored_parameter(self, rows: Tensor) -> StoredParameter:
        """Return the storage of a parameter.

        Raises:
            TransferError: It is not stored.
        """
        stored = self.parameter(rows)
        if stored is None:
            raise TransferError(
                f"a parameter of shape {list(rows.shape)} was on disk when the graph was compiled, and is not now "
                "(param.data = ..., a copy of the model): compile the model again"
            )
        return stored

    def wait(self, result: Tensor) -> None:
        """Make the values in `result` available to later computation of the device.

        Raises:
            TransferError: They could not be read, or `result` is not in transfer.
        """
        found = self._pending.pop(result.data_ptr(), None)
        if found is None and result.numel():
            raise TransferError("a tensor was waited for that no reload has started to fill, or that was waited for")
        if found is not None:
            found[1].finish(_bytes_of(result))

    def settle(self) -> None:
        """Return when all disk operations so far are done, for counting files or buffers."""
        meeting = threading.Barrier(_THREADS + 1)
        for _ in range(_THREADS):
            self._threads.submit(meeting.wait)
        meeting.wait()

    def _store_on_host(self, source: Tensor, tier: str) -> Stored:
        if tier != "host":
            raise TransferError(f"there is no tier {tier!r}; known: {', '.join(TIERS)}")
        return StoredOnHost(source, pool=self.host, lane=self._lane)

    def _store_on_disk(self, source: Tensor) -> Stored:
        size = source.numel()
        while self._writing and size + sum(item[2] for item in self._writing) > self._writing_bytes:
            _settle(*self._writing.popleft())
        path = self.folder / f"activation-{next(self._numbers)}"
        stored = StoredOnDisk(source, path, staging=self.staging, lane=self._lane, threads=self._threads)
        self._writing.append((stored.written, weakref.ref(stored), size))
        return stored

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # Their own current device would be the first one, on which a wait for an event would make a context.
        enter = partial(torch.cuda.set_device, self._device) if self._device.type == "cuda" else None
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="dsgraph-disk", initializer=enter)

    def _check_writes(self) -> None:
        while self._writing and self._writing[0][0].done():
            _settle(*self._writing.popleft())

    def _handle(self, stored: Stored) -> Tensor:
        ticket = _Ticket(next(self._numbers))
        ticket.stored = stored
        self._tickets[ctypes.addressof(ticket)] = ticket
        return torch.frombuffer(ticket, dtype=torch.int64)

    def _stored(self, handle: Tensor) -> Stored:
        # By its address: a code generator may compute other numbers in memory that nobody reads any more.
        ticket = self._tickets.get(handle.data_ptr())
        if ticket is None:
            raise TransferError(
                "the activation of a handle is not there: somebody has copied the handle (a hook on saved tensors, "
                "such as torch.autograd.graph.save_on_cpu): switch offloading off, or the hook"
            )
        return ticket.stored

    def _give_up(self, key: int, gone: weakref.ref[Tensor]) -> None:
        found = self._pending.get(key)
        if found is not None and found[0] is gone:
            del self._pending[key]
            found[1].give_up()


def _settle(future: Future[None], stored: weakref.ref[StoredOnDisk], _: int) -> None:
    """Wait for a write: its buffer is free then, whether the file is still needed or not.

    Raises:
        TransferError: It failed, and the file is still needed.
    """
    failure = future.exception()
    if failure is not None and stored() is not None:
        raise TransferError(str(failure)) from failure


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in memory order, `[n]` of uint8."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@cache
def transfers_of(device: torch.device) -> Transfers:
    """Return the transfers of a device; the same object for the whole process."""
    return Transfers(device)
