"""Lines that `initialize` prints, on the first rank."""

from __future__ import annotations

import torch.distributed as dist

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.read_config import ResolvedConfig
from dsgraph.ranks.first_rank import print_notes


def overruled(optimizer: object, lr_scheduler: object, settings: EngineConfig) -> list[str]:
    """Return a line for each section of the file that an argument replaces."""
    given = {"optimizer": (optimizer, settings.optimizer), "scheduler": (lr_scheduler, settings.scheduler)}
    return [
        f"{name} of the configuration has no effect: initialize was given one"
        for name, (argument, section) in given.items()
        if argument is not None and section is not None
    ]


def say(resolved: ResolvedConfig, more: list[str]) -> None:
    """Print the notes of a configuration and further ones, and the configuration itself if it asks for that."""
    print_notes(*resolved.notes, *more)
    if dist.get_rank() == 0 and resolved.config.dump_state:
        print(resolved.config.model_dump_json(indent=1), flush=True)
