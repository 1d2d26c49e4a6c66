"""Byte counts as users write them: a number, "60GiB", or a share of a device."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from numbers import Integral, Real

import torch

_PREFIXES = ("K", "M", "G", "T")
_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
}

MEMORY_SHARE = 0.9
"""The share of a device's memory that a step may use if no limit is set."""

_OUTSIDE = 2**30  # bytes of a CUDA context, of NCCL's buffers and of libraries' workspaces that are still to come

_STEP = 2**28  # limits are multiples of it, so that a program gets the same limit when it is started again

TAKES_BYTES = "a number of bytes (1 or more), a text such as '60GiB', or a share of the device such as 0.8"


def read_bytes(value: object) -> object:
    """Return a text such as "60GiB" or "1.5 GB" as a number of bytes, and a number as Python's int or float.

    Integers of any type, numpy's among them, are bytes; all other real numbers are shares. None stays None.

    Raises:
        ValueError: The text is not of that form, a number is neither bytes nor a share, or it is neither of the two.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
        units = {unit.lower(): size for unit, size in _UNITS.items()}
        if found is None or found[2].lower() not in units:
            raise ValueError(f"it takes {TAKES_BYTES}; units: {', '.join(_UNITS)}")
        value = int(float(found[1]) * units[found[2].lower()])
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"it takes {TAKES_BYTES}")
    number = int(value) if isinstance(value, Integral) else float(value)
    if not math.isfinite(number) or number <= 0 or (isinstance(number, float) and number > 1):
        raise ValueError(f"it takes {TAKES_BYTES}")
    return number


def on_device(size: float, device_type: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return a number of bytes unchanged, and a share as bytes of this rank's part of its device.

    Args:
        size: A number of bytes, or a float up to 1.
        device_type: "cuda": the current device. "cpu": the machine, divided among its ranks.
        environ: Environment with the number of ranks of the machine (LOCAL_WORLD_SIZE); without it, one.
    """
    if isinstance(size, int):
        return size
    if device_type == "cuda":
        return int(size * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(size * memory / int(environ.get("LOCAL_WORLD_SIZE", "1")))


def default_limit(total: int, free: int, own: int) -> int:
    """Return the bytes that a step may use of a device's memory if no limit is set.

    Args:
        total: Bytes of the device.
        free: Bytes of it that nobody has taken.
        own: Bytes that this process's allocator has taken, in use or not.
    """
    within_reach = max(own, free + own - _OUTSIDE)
    return int(min(MEMORY_SHARE * total, within_reach)) // _STEP * _STEP


def default_limit_of_device() -> int:
    """Return `default_limit` of the current CUDA device, as it is now."""
    free, total = torch.cuda.mem_get_info()
    return default_limit(total, free, torch.cuda.memory_reserved())
