"""All ranks save or load the same checkpoint: one folder, one tag."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dsgraph.errors import CheckpointError, RanksDisagreeError
from dsgraph.sharding.presence import Passage

from .together import exchange, ranks_of
from .told import tell

# How long a rank waits for others before it says so, seconds.
SAYS_AFTER = 5.0


def one_tag(
    module: nn.Module,
    doing: str,
    *,
    tag: object,
    validation: str,
    problem: str = "",
    same: dict[str, Any],
    passage: Passage | None = None,
) -> str | None:
    """The tag for all ranks, which call it together.

    Args:
        module: The partitioned model.
        doing: "save_checkpoint", for messages.
        tag: This rank's, if it names one.
        validation: What happens where tags differ: "Fail" raises; "Warn" prints that the first rank's counts, and
            "Ignore" does not.
        problem: Why this rank cannot go on; empty: it can.
        same: Arguments that must be equal on all ranks, as JSON values.
        passage: Shows which ranks train instead.

    Returns:
        The first rank's tag, as text.

    Raises:
        CheckpointError: A rank has a problem, or arguments differ; all ranks raise.
        RanksDisagreeError: Other ranks do not call it.
    """
    mine = {"problem": problem, "same": same, "tag": None if tag is None else str(tag)}
    texts = _exchange(module, doing, json.dumps(mine), passage)
    said = {rank: json.loads(text) for rank, text in texts.items()}
    first = next(iter(said))
    for rank, other in said.items():
        if other["problem"]:
            raise CheckpointError(f"{doing}: rank {rank}: {other['problem']}")
        for name, value in said[first]["same"].items():
            if other["same"].get(name) != value:
                found = other["same"].get(name)
                raise CheckpointError(
                    f"{doing}: {name} is {value!r} on rank {first} and {found!r} on rank {rank}: it must be the same"
                )
    chosen: str | None = said[first]["tag"]
    differing = next((rank for rank, other in said.items() if other["tag"] != chosen), None)
    if differing is not None and validation != "Ignore":
        text = f"{doing}: the tag is {chosen!r} on rank {first} and {said[differing]['tag']!r} on rank {differing}"
        if validation == "Fail":
            raise CheckpointError(f"{text}: it must be the same on all ranks, as checkpoint.tag_validation asks")
        tell(f"{text}: all take {chosen!r} (checkpoint.tag_validation)")
    return chosen


def _exchange(module: nn.Module, doing: str, text: str, passage: Passage | None) -> dict[int, str]:
    if passage is None:
        return exchange(module, f"that they {doing}", text)
    ranks = ranks_of(module)
    with passage.through(doing, ranks):
        try:
            return exchange(module, f"that they {doing}", text, elsewhere=_Look(passage, doing, ranks).elsewhere)
        except RanksDisagreeError:
            passage.take_back()
            raise


@dataclass
class _Look:
    """Looks for the other ranks while this one waits, and says once that it does."""

    passage: Passage
    doing: str
    ranks: tuple[int, ...]
    since: float = field(default_factory=time.monotonic)
    has_said: bool = False

    def elsewhere(self) -> str:
        """See `Passage.elsewhere`."""
        if not self.has_said and time.monotonic() - self.since > SAYS_AFTER:
            self.has_said = True
            text = f"dsgraph: rank {self.passage.presence.rank} waits in {self.doing} for other ranks. All ranks must "
            print(f"{text}call it at the same point, not under `if rank == 0:`", file=sys.stderr, flush=True)
        return self.passage.elsewhere(self.ranks)
