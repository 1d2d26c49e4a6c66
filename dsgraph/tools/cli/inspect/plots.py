"""Pictures, drawn with matplotlib, which is an optional package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsgraph.tools.cli.command import CommandError

SUFFIXES = (".svg", ".png", ".pdf")


def new_figure(*, rows: int, height: float) -> tuple[Any, list[Any]]:
    """Return a figure with `rows` axes, one below the other, `height` inches each.

    Raises:
        CommandError: matplotlib is not installed.
    """
    figure, axes = new_grid(rows=rows, height=height)
    return figure, [row[0] for row in axes]


def new_grid(*, rows: int, height: float, widths: Sequence[float] = (1.0,)) -> tuple[Any, list[list[Any]]]:
    """Return a figure with rows of axes, `height` inches each, and columns whose widths are as `widths` to one another.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise CommandError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    mpl.use("Agg")  # no display
    mpl.rcParams["svg.hashsalt"] = "dsgraph"  # the same picture is the same file
    from matplotlib import pyplot

    size = (10, 0.4 + height * rows)
    figure, axes = pyplot.subplots(
        rows, len(widths), figsize=size, squeeze=False, layout="constrained", width_ratios=list(widths)
    )
    return figure, [list(row) for row in axes]


def check_path(path: Path) -> None:
    """Refuse a file that no picture can go to.

    Raises:
        CommandError: Its suffix is not one of SUFFIXES, or its folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise CommandError(f"--plot is {path}; it takes a file that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise CommandError(f"--plot is {path}, and the folder {path.parent} does not exist")


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file.

    Raises:
        CommandError: The file cannot be written.
    """
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise CommandError(f"--plot: {path} cannot be written: {error.strerror}") from None
