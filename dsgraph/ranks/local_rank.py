"""The number of a rank on its host."""

from __future__ import annotations

import os
from collections.abc import Mapping


def local_rank(devices: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank on its host, from 0.

    Launchers such as srun and mpirun set no LOCAL_RANK: then it is RANK modulo the devices, for ranks that fill one
    host after the other.

    Args:
        devices: Number of devices of this host, 1 or more.
        environ: The environment variables.
    """
    if "LOCAL_RANK" in environ:
        return int(environ["LOCAL_RANK"])
    return int(environ.get("RANK", "0")) % devices
