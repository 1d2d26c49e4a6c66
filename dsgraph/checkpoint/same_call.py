"""Checks that all ranks save or load the same checkpoint: one folder, one tag."""

from __future__ import annotations

import json
from typing import Any

from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import CheckpointError


def one_tag(
    agreement: Agreement,
    doing: str,
    *,
    tag: object,
    validation: str,
    problem: str = "",
    same: dict[str, Any],
) -> str | None:
    """Return the tag that all ranks use. All ranks call it together.

    Args:
        agreement: The ranks.
        doing: "save_checkpoint", for messages.
        tag: This rank's, if it names one.
        validation: What to do if tags differ: "Fail" raises; "Warn" prints that the first rank's tag is used;
            "Ignore" uses it silently.
        problem: Why this rank cannot continue; empty if it can.
        same: Arguments that must be equal on all ranks, as JSON values.

    Returns:
        The first rank's tag, as text.

    Raises:
        CheckpointError: A rank has a problem, or arguments differ; all ranks raise.
        RanksDisagreeError: Other ranks do not call it.
    """
    mine = {"problem": problem, "same": same, "tag": None if tag is None else str(tag)}
    texts = agreement.exchange(f"that they {doing}", json.dumps(mine))
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
        print_notes(f"{text}: all take {chosen!r} (checkpoint.tag_validation)")
    return chosen
