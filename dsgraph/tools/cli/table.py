"""Human-readable tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[Sequence[str]], headers: Sequence[str] = (), *, right: Collection[int] = ()) -> str:
    """Return the rows of text in columns. `dsgraph doctor` must print one where even tabulate is missing.

    Args:
        rows: One list of cells a row.
        headers: Of the columns.
        right: Numbers of the columns to align at their right end.
    """
    try:
        from tabulate import tabulate
    except ImportError:
        lines = [headers, *rows] if headers else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    aligned = ["right" if number in right else "left" for number in range(len(headers))] if rows else None
    # Numbers come as text that is written as it should be read.
    return tabulate(
        rows,
        headers=headers,
        tablefmt="simple" if headers else "plain",
        disable_numparse=True,
        colalign=aligned or None,
    )
