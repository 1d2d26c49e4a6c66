"""Process groups and their stores."""

from __future__ import annotations

from datetime import timedelta
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
