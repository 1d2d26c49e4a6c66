"""Lines that one rank prints for all."""

from __future__ import annotations

import torch.distributed as dist


def print_notes(*notes: str) -> None:
    """Print a line for each note, on the first rank."""
    if dist.get_rank() == 0:
        for note in notes:
            print(f"dsgraph: {note}", flush=True)
