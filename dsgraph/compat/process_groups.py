"""Process groups and their stores."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def own_store() -> dist.Store:
    """Return the default store on a connection of its own, so that waiting there blocks nobody else."""
    clone: dist.Store = default_store().clone()  # type: ignore[attr-defined]  # which torch's stubs lack
    return clone


def store_is_a_file() -> bool:
    """Return True if the default store is a `FileStore`."""
    store: Any = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return how long a collective of `group` may take before it fails."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.distributed_c10d.default_pg_timeout


@cache
def watch_checkpoints(before: Callable[[str, list[int]], None]) -> None:
    """Call a function before the main thread calls `save`, `async_save` or `load` of `torch.distributed.checkpoint`.

    It gets the name and the ranks that must call it together. Torch has no hook there other than its log of the calls,
    which is named here: importing the package takes longer than partitioning a model.
    """

    def see(record: Any) -> bool:
        from torch.distributed.checkpoint import save

        frame: Any = sys._getframe()
        while frame.f_code is not save.__code__:  # of the decorator that logs all calls
            frame = frame.f_back
        call, given = record.msg["func_name"], frame.f_locals["kwargs"]
        starts = record.msg["event"] == "start" and record.threadName == "MainThread" and dist.is_initialized()
        if starts and call in ("save", "async_save", "load") and not given.get("no_dist"):
            before(call, dist.get_process_group_ranks(given.get("process_group") or dist.group.WORLD))
        return True

    logging.getLogger("c10d-NullHandler-dcp_logger").addFilter(see)
