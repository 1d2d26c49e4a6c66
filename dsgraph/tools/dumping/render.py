"""Graphs as Python text to read, from their records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from .records import GraphRecord, NodeRecord, ValueRecord

_SHORT = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip

_MOST_INPUTS = 8

Paint = Callable[[str, str], str]
"""Colours a text: what it is ("comment", "type", "op", "name") and the text."""


def plain(kind: str, text: str) -> str:
    """Leave a text as it is."""
    return text


def render_graph(record: GraphRecord, nodes: Sequence[NodeRecord] | None = None, *, paint: Paint = plain) -> str:
    """Return a graph as a Python function. `nodes`: those to show; default: all."""
    render = partial(render_node, paint=paint)
    lines = [paint("comment", headline(record))]
    lines += render_function(record.phase, record.nodes, nodes, render=render, paint=paint)
    for body in record.bodies if nodes is None else ():
        lines += ["", *render_function(body.name, body.nodes, render=render, paint=paint)]
    return "\n".join(lines) + "\n"


def headline(record: GraphRecord) -> str:
    """Return a comment that says which graph it is."""
    after = f"after pass {record.number}, {record.pass_name}" if record.pass_name else "before any pass"
    return f"# {record.phase} graph {after} (rank {record.rank}, compile {record.compile}): {len(record.nodes)} nodes"


def render_function(
    name: str,
    nodes: Sequence[NodeRecord],
    shown: Sequence[NodeRecord] | None = None,
    *,
    render: Callable[[NodeRecord], str],
    paint: Paint = plain,
) -> list[str]:
    """Return the lines of a graph: its inputs, then one line a node, under its place in the user's model."""
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    listing = inputs if len(inputs) <= _MOST_INPUTS else [inputs[0], "...", inputs[-1]]  # each has a line of its own
    lines = [f"def {name}({', '.join(listing)}):" + (f"  # {len(inputs)} inputs" if listing is not inputs else "")]
    place = ("", "")
    for node in nodes if shown is None else shown:
        if node.op not in ("placeholder", "output") and (node.module, node.source) != place:
            place = (node.module, node.source)
            where = "  ".join(part for part in (*place, node.code) if part)
            lines.append(paint("comment", f"    # {where}") if where else "")
        lines.append(f"    {render(node)}")
    return lines


def render_node(node: NodeRecord, *, paint: Paint = plain) -> str:
    """Return one line: `mm: "f32[2, 3] cpu" = torch.ops.aten.mm.default(x, w)  # made by ...`."""
    remark = ", ".join([node.recompute] * bool(node.recompute) + [f"{e.action} by {e.pass_name}" for e in node.history])
    if node.op == "placeholder" and node.parameter:
        remark = f"parameter {node.parameter}" + (f", {remark}" if remark else "")
    end = paint("comment", f"  # {remark}") if remark else ""
    values = ", ".join(map(render_value, node.values))
    kind = paint("type", f': "{values}"') if values else ""
    if node.op == "placeholder":
        return f"{paint('name', node.name)}{kind}{end}"
    if node.op == "output":
        return f"return {without_marks(node.args)}{end}"
    called = "" if node.op == "get_attr" else f"({without_marks(node.args)})"
    return f"{paint('name', node.name)}{kind} = {paint('op', _callee(node))}{called}{end}"


def render_value(value: ValueRecord) -> str:
    """Return `f32[2, 3] cpu`."""
    sizes = ", ".join(map(str, value.shape))
    return f"{_SHORT.get(value.dtype, value.dtype)}[{sizes}] {value.device}"


def without_marks(args: str) -> str:
    """Return the arguments as Python has them: `%x` becomes `x`."""
    return re.sub(r"%(?=\w)", "", args)


def _callee(node: NodeRecord) -> str:
    if node.op == "call_function" and re.fullmatch(r"\w+\.\w+\.\w+", node.target):
        return f"torch.ops.{node.target}"
    return f"self.{node.target}" if node.op in ("get_attr", "call_module") else node.target


def bytes_text(size: float | None) -> str:
    """Return `1.50 MB`, three digits, in powers of ten; "?" when unknown."""
    if size is None:
        return "?"
    unit = next(unit for unit in ("B", "kB", "MB", "GB", "TB") if abs(size) < 999.5 * _UNITS[unit] or unit == "TB")
    number = size / _UNITS[unit]
    digits = 0 if unit == "B" or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{digits}f} {unit}"


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def ms_text(seconds: float) -> str:
    """Return seconds as milliseconds, three digits: `0.526`."""
    return f"{1000 * seconds:.3g}"


def listed(items: Iterable[str], *, most: int = 3) -> str:
    """Return `a, b, c and 4 more`."""
    found = list(items)
    text = ", ".join(found[:most])
    return f"{text} and {len(found) - most} more" if len(found) > most else text
