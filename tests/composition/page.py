"""Writes the page of what works together, from the table of features.

python -m tests.composition.page docs/reference/composition.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from .features import FEATURES, REFUSED, pairs

_BEGIN = """# What works together

<!-- written by `python -m tests.composition.page`: edit tests/composition/features.py -->

Each two of these features are trained together on real ranks, and the losses compared with those of one process:

{features}

Of {pairs} pairs {right} are right: {share} of those with a meaning. These are refused, each by an error with the text
shown:

| features | error | why | has a meaning |
|---|---|---|---|
{refused}

Each feature is in a run of `make test`, most of them with others. `make test-all` runs each alone, and all pairs.
"""


def page() -> str:
    """Return the text of the page."""
    refused = [refusal for pair in pairs() for refusal in REFUSED if refusal.applies(pair)]
    with_meaning = len(pairs()) - sum(not refusal.has_meaning for refusal in refused)
    right = len(pairs()) - len(refused)
    rows = [
        f"| {', '.join(sorted(refusal.features))} | `{refusal.error}` | {refusal.why} | "
        f"{'yes' if refusal.has_meaning else 'no'} |"
        for refusal in sorted(REFUSED, key=lambda refusal: sorted(refusal.features))
    ]
    return _BEGIN.format(
        features="\n".join(f"- {feature.name}" for feature in FEATURES),
        pairs=len(pairs()),
        right=right,
        share=f"{right / with_meaning:.1%}".replace("%", " %"),
        refused="\n".join(rows),
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
