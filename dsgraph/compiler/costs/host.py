"""What this machine and its devices are called, in calibrations."""

from __future__ import annotations

import platform
import socket
from contextlib import suppress
from pathlib import Path

import torch


def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname()


def device_name(device_type: str) -> str:
    """The name of this process's device of a type; of its processor for "cpu"."""
    if device_type == "cpu":
        return _processor()
    module = torch.get_device_module(device_type)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device_type


def _processor() -> str:
    """The processor's model as Linux tells it, elsewhere as Python does."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"
