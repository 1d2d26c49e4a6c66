"""The search for the known name that a user meant by an unknown one. Imports no torch, for the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable

SYNONYMS: dict[str, tuple[str, ...]] = {
    "accumulate_grad_batches": ("gradient_accumulation_steps",),
    "adan": (),  # a different optimizer, like the next two
    "nadamw": (),
    "radamw": (),
    "batch_size": ("train_micro_batch_size_per_gpu",),
    "clip_grad_norm": ("gradient_clipping",),
    "cpu_offload": ("offload_optimizer",),
    "cpu_offload_params": ("offload_param",),
    "data_parallel": ("dp",),
    "float16": ("fp16",),
    "fusedadam": ("Adam",),
    "grad_clip": ("gradient_clipping",),
    "gradient_clip_val": ("gradient_clipping",),
    "learning_rate": ("lr",),
    "max_grad_norm": ("gradient_clipping",),
    "max_norm": ("gradient_clipping",),
    "mem_limit": ("memory_limit",),
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "mode": (),
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "pipeline_parallel": ("pp",),
    "tensor": ("tp",),
    "tensor_parallel": ("tp",),
    "zero_stage": ("stage",),
}
"""Names of other libraries and earlier DeepSpeed versions, in lower case, with ours; empty if we have no such name."""
_MOST = 2  # names that one hint offers at most


def nearest(found: str, known: Iterable[str], *, where: str = "") -> str:
    """Return a question with the known names that `found` may mean, to end an error message; empty if there is none.

    Args:
        found: The name that the user wrote.
        known: The names that are accepted.
        where: Where these names are accepted, if elsewhere.
    """
    close = near(found, known)
    return f"; did you mean {' or '.join(map(repr, close))}{f' {where}' if where else ''}?" if close else ""


def near(found: str, known: Iterable[str]) -> list[str]:
    """Return the known names that `found` may mean: at most two, best first, and none in case of doubt.

    These are, in this order: the same name in other case or punctuation; a synonym; one with a single slip of the hand;
    names that hold all its words or begin with it; a name of which it holds two words or more in a row; one with a slip
    for each five characters. Two names that differ in their digits are different things.
    """
    names = list({_letters(name): name for name in reversed([*known])}.values())[::-1]
    plain = _letters(found)
    same = [name for name in names if _letters(name) == plain]
    if same or len(plain) < 2:
        return same
    if found.lower() in SYNONYMS:
        return [name for name in SYNONYMS[found.lower()] if name in names]
    slips = {name: _slips(plain, _letters(name)) for name in names if _digits(name) == _digits(found)}
    slipped = _least(slips, most=max(1, len(plain) // 5)) if len(plain) > 2 else []
    longer = [
        name for name in names if _has_words(name, found) or (len(plain) > 2 and _letters(name).startswith(plain))
    ]
    shorter = [name for name in names if len(_words(name)) > 1 and _has_words(found, name)]
    for close in (_least(slips, most=1) if slipped else [], longer, sorted(shorter, key=len)[-1:], slipped):
        if close:
            return close if len(close) <= _MOST else []
    return []


def _least(slips: dict[str, int], *, most: int) -> list[str]:
    least = min([*slips.values(), most])
    return [name for name, count in slips.items() if count == least]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _digits(name: str) -> list[str]:
    return sorted(re.findall(r"\d", name))


def _has_words(name: str, sought: str) -> bool:
    """Return True if `name` contains the words of `sought` in this order."""
    words = iter(_words(name))
    return all(any(word == own for own in words) for word in _words(sought))


def _slips(one: str, other: str) -> int:
    """Return the number of typing mistakes between two names: the optimal string alignment distance."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
