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

{right} of {pairs} pairs are right, {share} of the pairs that can be supported. Each other pair is refused by an error
that contains the text shown. "no" in the last column: nothing could be computed with both features, so no work would
make them compatible.

| features | error | why | can be supported |
|---|---|---|---|
{refused}

`make test` trains each feature, most of them together with others. `make test-all` trains each feature alone, and all
pairs.
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
