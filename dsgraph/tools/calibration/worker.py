"""A rank that `dsgraph calibrate` starts: `python -m dsgraph.tools.calibration.worker FILE SECONDS DEVICE...`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dsgraph.compiler.costs.calibration_record import to_text

from .measure_ranks import measure_ranks

# How long one collective may take before the measurement fails.
_TIMEOUT = timedelta(seconds=60)


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the calibrations of the first rank to a file, one a line."""
    path, seconds, *device_types = arguments
    with process_group():
        records = measure_ranks(device_types, seconds=float(seconds))
        if dist.get_rank() == 0:
            Path(path).write_text("".join(to_text(record) + "\n" for record in records), encoding="utf-8")


@contextmanager
def process_group() -> Iterator[None]:
    """Create the group of all ranks that torchrun started. It uses gloo: ranks also exchange CPU tensors."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
