"""Names of this machine and its devices in calibrations."""

from __future__ import annotations

import platform
import socket
from contextlib import suppress
from pathlib import Path

import torch


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def device_name(device_type: str) -> str:
    """Return the name of this process's device of a type; of its processor for "cpu"."""
    if device_type == "cpu":
        return _processor()
    module = torch.get_device_module(device_type)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device_type


def _processor() -> str:
    """Return the processor's model as Linux reports it, on other systems as Python does."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"
