"""Reasons why Dynamo compiled a function again: its guards, in words if they concern modules of dsgraph."""

from __future__ import annotations

import re

# Pattern of a failed guard on a module's `PartitionedModule` -> what the caller did.
_IN_WORDS = (
    (r"\.accumulating == True", "outside dsgraph.accumulate: the last micro-batch, or a step of one"),
    (r"\.accumulating == False", "inside dsgraph.accumulate"),
    (r"\.gradients_stay_local == True", "a step without dsgraph.accumulate, after one with it"),
    (r"\.gradients_stay_local == False", "inside dsgraph.accumulate, where gradients are added up on each rank"),
    (r"\.(sum_for_graphs|leaf)\b", "no accumulated gradients: a step without dsgraph.accumulate, after one with it"),
    (r"\.gathered_copy\b", "other gathered copies are held: dsgraph.accumulate began or ended"),
)


def in_words(guard: str) -> str:
    """Return what changed between two calls, from the guard that failed.

    A guard of the user's own values is returned unchanged.
    """
    if "._dsgraph" not in guard:
        return guard
    return next((words for pattern, words in _IN_WORDS if re.search(pattern, guard)), guard)
