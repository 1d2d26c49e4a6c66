"""What passes know of an axis of the device mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the device mesh: its name, how many ranks it spans, its process group and that group's backend."""

    name: str
    size: int
    group: str
    backend: str
