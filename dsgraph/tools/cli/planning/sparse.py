"""`dsgraph sparse`: layouts of block-sparse attention, their densities, and pictures of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.inspect import plots
from dsgraph.tools.cli.table import table

if TYPE_CHECKING:
    from dsgraph.inductor_ext.sparse.layouts import Layout


def sparse(args: argparse.Namespace) -> Answer:
    """Return density and operations of layouts at a length."""
    from dsgraph.inductor_ext.sparse.layouts import SparseLayoutError

    if args.length < 1 or args.heads < 1:
        raise CommandError(f"--length is {args.length} and --heads {args.heads}; both must be 1 or more")
    if args.plot is not None:
        plots.check_path(args.plot)
    try:
        layouts = _layouts(args.layout)
        rows = [_row(layout, args) for layout in layouts]
    except SparseLayoutError as error:
        raise CommandError(str(error)) from None
    if args.plot is not None:
        _draw(layouts, args)
    heads = ["mode", "block", "density", "ideal speed-up", "GFLOP a forward"]
    text = table([_line(row) for row in rows], heads, right=range(1, 5))
    return Answer(text, {"length": args.length, "heads": args.heads, "layouts": rows})


def _line(row: dict[str, Any]) -> list[str]:
    return [row["mode"], str(row["block"]), f"{row['density']:.4f}", f"{row['ideal']:.1f}", f"{row['gflop']:.1f}"]


def _layouts(given: list[str] | None) -> list[Layout]:
    from dsgraph.inductor_ext.sparse.reading import MODES, layout_of

    if not given:
        return [layout_of({"mode": mode}) for mode in MODES if mode != "custom"]
    return [layout_of(_section(text)) for text in given]


def _section(text: str) -> dict[str, Any]:
    """Return a layout's name, or its section as JSON."""
    if not text.lstrip().startswith("{"):
        return {"mode": text}
    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"LAYOUT is {text!r}: invalid JSON ({error.msg})") from None
    return found


def _row(layout: Layout, args: argparse.Namespace) -> dict[str, Any]:
    density = layout.density(args.heads, args.length)
    gflop = layout.flops(args.heads, args.length, args.width) / 1e9
    return {**json.loads(layout.text), "block": layout.block, "density": density, "ideal": 1 / density, "gflop": gflop}


def _draw(layouts: list[Layout], args: argparse.Namespace) -> None:
    """Draw the blocks of the first head of each layout, keys to the right and queries downwards."""
    columns = 3
    rows = -(-len(layouts) // columns)
    figure, axes = plots.new_grid(rows=rows, height=3.4, widths=(1.0,) * columns)
    places = [axis for row in axes for axis in row]
    for axis, layout in zip(places, layouts, strict=False):
        codes = layout.codes(args.heads, args.length).codes[0]
        shade = codes.ne(0).float() - 0.4 * codes.gt(1).float()  # blocks that count in part are lighter
        axis.imshow(shade.numpy(), cmap="Blues", vmin=0, vmax=1.2, interpolation="nearest")
        axis.set_title(f"{layout.mode}: {layout.density(args.heads, args.length):.1%}", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    for axis in places[len(layouts) :]:
        axis.set_visible(False)
    plots.save(figure, args.plot)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layout",
        metavar="LAYOUT",
        nargs="*",
        help='a mode, such as fixed, or a section in JSON, {"mode": "fixed", "block": 32} (default: all modes)',
    )
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="tokens of a sequence (default: 512)")
    parser.add_argument("--heads", type=int, default=12, help="query heads (default: 12)")
    parser.add_argument("--width", type=int, default=64, help="width of a head (default: 64)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the blocks to a file: .svg, .png or .pdf")


COMMAND = Command(
    name="sparse",
    help="show layouts of block-sparse attention",
    description="Show the share of scores that layouts of block-sparse attention compute, and their FLOPs.",
    configure=_configure,
    run=sparse,
)
