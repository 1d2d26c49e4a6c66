"""Known remedies for lines that torch cannot capture."""

from __future__ import annotations

import re

_EXPERTS = (
    "transformers' experts of implementation 'eager' depend on values: call "
    'model.set_experts_implementation("grouped_mm") before the first forward, which is captured'
)


def remedy(*said: str) -> str:
    """Return a sentence that says how to make a line capturable; empty if no remedy is known.

    Args:
        *said: Place and reason in torch's words.
    """
    text = " ".join(said)
    depends_on_values = re.search(r"nonzero|data-dependent|[Dd]ynamic shape operator|\bexpert_", text)
    return f" {_EXPERTS}." if depends_on_values and re.search(r"transformers.models.\w+.modeling_", text) else ""
