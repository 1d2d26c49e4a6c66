"""The part of `dsgraph plan --compile` that compares the captured graphs with the formulas."""

from __future__ import annotations

from dsgraph.parallel.planning.gpus import GIB
from dsgraph.tools.cli.table import table
from dsgraph.tools.planning.captured_layout import PARTS, Comparison

_WHY = """\
- gradients are stored in float32, like the optimizer's parameters; publications count half precision
- stages 1 and 2 store half-precision copies of parameters; stages 0 and 3 make them at each use, in the buffers
- buffers: one micro-batch through two layers, run by the eager code generator"""


def captured_text(found: Comparison) -> str:
    """Return the table, and why its columns differ."""
    rows = [
        [part.replace("_", " "), _gib(found.captured[part]), _gib(found.formula[part]), _off(found, part)]
        for part in PARTS
    ]
    one, two = found.of.one, found.of.two
    return (
        f"compiled for rank 0, with simulated other ranks: stages of 1 and 2 layers, {one.nodes} and "
        f"{two.nodes} nodes, in {one.seconds + two.seconds:.0f} s; repeated for {found.layers:.4g} layers\n"
        f"{table(rows, ['GiB per GPU, layers only', 'captured', 'formula', 'differs'], right=(1, 2, 3))}\n{_WHY}"
    )


def _off(found: Comparison, part: str) -> str:
    formula = found.formula[part]
    return f"{found.captured[part] / formula - 1:+.1%}" if formula else "-"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
