"""How `dsgraph plan` shows layouts. Bytes of memory are in GiB, bytes that are sent in GB."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dsgraph.parallel.planning.gpus import GIB, NodeGpu
from dsgraph.parallel.planning.layout import ModelShape, TrainingSetup
from dsgraph.parallel.planning.layout_plan import ASSUMPTIONS, LayoutPlan, efficiency
from dsgraph.parallel.planning.search import SearchResult
from dsgraph.tools.cli.table import table
from dsgraph.tools.dumping.render import bytes_text

_PARTS = ("parameters", "gradients", "optimizer", "model_states", "activations", "buffers", "total")
_SHOWN = 10


def plan_text(item: LayoutPlan, model: ModelShape, training: TrainingSetup, *, gpu: NodeGpu, explain: bool) -> str:
    """Return one layout, with its assumptions."""
    parts = [
        f"{_head(model, training, gpu, item.layout.gpus)}\n{_layout_line(item, training)}",
        _memory(item, gpu),
        _links(item),
        _times(item),
        "assumptions\n" + "\n".join(f"- {line}" for line in (*_parameters(item), *ASSUMPTIONS)),
    ]
    return "\n\n".join(parts + ([_explanation(item)] if explain else []))


def search_text(found: SearchResult, model: ModelShape, training: TrainingSetup, *, gpu: NodeGpu, explain: bool) -> str:
    """Return the fastest layouts, and why others are not among them."""
    shown = found.fitting or found.too_large
    gpus = shown[0].layout.gpus if shown else 0
    refused = ", ".join(f"{count} for {reason}" for reason, count in found.refused.items()) or "none"
    counts = (
        f"{len(found.fitting)} layouts fit, {len(found.too_large)} take more memory than "
        f"{_gib(shown[0].usable) if shown else '?'} GiB per GPU, refused: {refused}"
    )
    if not shown:
        return counts
    why = "" if found.fitting else "; these take the least"
    headers = ["tp", "pp", "dp", "GiB per GPU", "efficiency", "step s", "TFLOPS", "with recomputation"]
    parts = [
        f"{_head(model, training, gpu, gpus)}\n{counts}{why}",
        table([_row(item) for item in shown[:_SHOWN]], headers, right=range(8)),
    ]
    if len(shown) > _SHOWN:
        parts.append(f"and {len(shown) - _SHOWN} more (--json)")
    return "\n\n".join(parts + ([_explanation(shown[0])] if explain else []))


def plan_data(item: LayoutPlan, *, explain: bool) -> dict[str, Any]:
    """Return one layout, in bytes, seconds and FLOPs."""
    data: dict[str, Any] = {
        "layout": asdict(item.layout),
        "fits": item.fits,
        "usable": item.usable,
        "memory": {"divided evenly": dict(item.even), "first stage": dict(item.first), "last stage": dict(item.last)},
        "links": [asdict(link) for link in item.links],
        "values": dict(item.values),
        "assumptions": [*_parameters(item), *ASSUMPTIONS],
    }
    if explain:
        data["formulas"] = [
            {
                "of": heading,
                "name": step.formula.name,
                "what": step.formula.what,
                "formula": step.symbolic,
                "with_values": step.with_values,
                "value": step.value,
                "unit": step.formula.unit,
                "source": step.formula.source,
            }
            for heading, step in item.steps
        ]
    return data


def search_data(found: SearchResult, *, explain: bool) -> dict[str, Any]:
    """Return all layouts; formulas of the first one alone."""
    return {
        "fitting": [plan_data(item, explain=explain and number == 0) for number, item in enumerate(found.fitting)],
        "too_large": [plan_data(item, explain=False) for item in found.too_large],
        "refused": found.refused,
    }


def _head(model: ModelShape, training: TrainingSetup, gpu: NodeGpu, gpus: int) -> str:
    recomputed = "each layer recomputed in the backward" if training.checkpointing else "all activations kept"
    return (
        f"{_count(model.params)} parameters: {model.layers:,} layers of {model.hidden:,}, {model.heads} heads, "
        f"vocabulary {model.vocab:,}, sequences of {model.seq:,}\n"
        f"{gpus:,} {gpu.name}, {gpu.per_node} in a node ({gpu.node}), {gpu.peak_flops / 1e12:.0f} TFLOPS peak\n"
        f"a step of {training.batch:,} sequences, ZeRO stage {training.zero_stage}, {recomputed}"
    )


def _layout_line(item: LayoutPlan, training: TrainingSetup) -> str:
    layout = item.layout
    return (
        f"{layout.tp} tensor x {layout.pp} pipeline x {layout.dp} data; "
        f"{item.values['micro_batches']:,.0f} micro-batches of {training.micro_batch} through each pipeline"
    )


def _memory(item: LayoutPlan, gpu: NodeGpu) -> str:
    sides = (item.even, item.first, item.last)
    rows = []
    for part in _PARTS:
        rows.append([part.replace("_", " "), *(_gib(side[part]) for side in sides)])
        if part == "activations":
            both = [_gib(side["model_states"] + side["activations"]) for side in sides]
            rows.append(["model states + activations", *both])
    headers = ["GiB per GPU", "even split", "first stage", "last stage"]
    verdict = "fits" if item.fits else "DOES NOT FIT"
    return (
        f"{table(rows, headers, right=(1, 2, 3))}\n"
        f"{verdict}: {_gib(item.fullest)} GiB of {_gib(item.usable)} GiB usable "
        f"({item.usable / gpu.memory_bytes:.0%} of the GPU's {_gib(gpu.memory_bytes)} GiB)"
    )


def _links(item: LayoutPlan) -> str:
    rows = [
        [
            *(link.axis, str(link.ranks), "inside a node" if link.inside else "across nodes"),
            *(bytes_text(link.sent), f"{link.bytes_per_s / 1e9:.1f}", f"{link.seconds:.2f}"),
        ]
        for link in item.links
    ]
    return table(rows, ["axis", "ranks", "link", "sent per GPU and step", "GB/s", "s"], right=(1, 3, 4, 5))


def _times(item: LayoutPlan) -> str:
    values, stages = item.values, item.layout.pp
    computing = values["micro_batches"] * values["micro_compute"]
    sending = values["tp_time"] + values["pp_time"] + values["dp_time"]
    lines = [
        f"bubble: {values['bubble']:.1%} of the pipeline's time, efficiency {values['efficiency']:.1%}"
        if stages > 1
        else "bubble: none, there is one stage"
    ]
    if stages > 1:
        lines.append(
            f"  with 4 and 8 times as many micro-batches as stages: efficiency {efficiency(stages, 4 * stages):.1%} "
            f"and {efficiency(stages, 8 * stages):.1%}"
        )
    lines.append(
        f"step: {values['step']:.2f} s, of which computation {computing:.2f} s, communication {sending:.2f} s, "
        f"bubble {values['waiting']:.2f} s"
    )
    lines.append(
        f"TFLOPS per GPU: {values['model_rate'] / 1e12:.1f} of the model, "
        f"{values['hardware_rate'] / 1e12:.1f} with recomputation"
    )
    return "\n".join(lines)


def _parameters(item: LayoutPlan) -> list[str]:
    """Describe the differences between the model's parameter counts: memory uses one, computation the others."""
    values = item.values
    counted = 12 * values["layers"] * values["hidden"] ** 2 + values["vocab"] * values["hidden"]
    return [
        f"memory is computed from params, {_count(values['params'])}; FLOPs from layers, hidden and vocab, which make "
        f"{_count(counted)} parameters"
    ]


def _explanation(item: LayoutPlan) -> str:
    lines = []
    heading = ""
    for of, step in item.steps:
        if of != heading:
            heading = of
            lines.append(f"formulas: {of}\n")
        formula = step.formula
        lines.append(
            f"{formula.name}: {formula.what}\n  = {step.symbolic}\n  = {step.with_values}\n"
            f"  = {_value(step.value, formula.unit)}\n  source: {formula.source}\n"
        )
    return "\n".join(lines).rstrip()


def _value(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value:,.0f} bytes ({_gib(value)} GiB)"
    return f"{value:,.6g} {unit}".rstrip()


def _row(item: LayoutPlan) -> list[str]:
    values, layout = item.values, item.layout
    return [
        *(str(layout.tp), str(layout.pp), str(layout.dp), _gib(item.fullest), f"{values['efficiency']:.1%}"),
        *(f"{values['step']:.2f}", f"{values['model_rate'] / 1e12:.1f}", f"{values['hardware_rate'] / 1e12:.1f}"),
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _count(number: float) -> str:
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {suffix}"
    return f"{number:,.0f}"
