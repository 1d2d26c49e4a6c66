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

Of {pairs} pairs {right} are right. These are refused, each by an error with the text shown:

| features | error | why |
|---|---|---|
{refused}

A test of each feature is part of `make test`, and all pairs are part of `make test-all`.
"""


def page() -> str:
    """Return the text of the page."""
    refused = [pair for pair in pairs() if any(refusal.applies(pair) for refusal in REFUSED)]
    rows = [
        f"| {', '.join(sorted(refusal.features))} | `{refusal.error}` | {refusal.why} |"
        for refusal in sorted(REFUSED, key=lambda refusal: sorted(refusal.features))
    ]
    return _BEGIN.format(
        features="\n".join(f"- {feature.name}" for feature in FEATURES),
        pairs=len(pairs()),
        right=len(pairs()) - len(refused),
        refused="\n".join(rows),
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
