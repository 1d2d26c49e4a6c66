"""ChooseCollectiveAlgorithms: each collective in the form that is fastest on its backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import GATHERS, REDUCE_SCATTERS, Ranks, c10d_functional
from dsgraph.inductor_ext.collectives.algorithms import Gather, ReduceScatter
from dsgraph.passes.analysis.cost import sent_bytes
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.collectives import collective_group
from dsgraph.passes.ir.gathers import computing_unit
from dsgraph.passes.ir.graph import (
    bound_arguments,
    fake_value,
    find_calls,
    is_wait,
    replace_and_erase,
    wait_of,
)
from dsgraph.passes.ir.recording import Recordings
from dsgraph.passes.ir.save_plan import inherit

_MESSAGES, _ALL_TO_ALL, _OWN = "exchange_by_messages", "all_to_all_single", "reduce_scatter_tensor"


@dataclass(frozen=True)
class ChooseCollectiveAlgorithms(GraphPass):
    """On gloo, gather by messages and reduce in the form that is predicted to be fastest.

    before:  w = wait_tensor(all_gather_into_tensor(shard, 2, "0"))
    after:   w = wait_tensor(gather_by_messages(shard, 2, "0"))

    before:  own = wait_tensor(reduce_scatter_tensor(grad, "sum", 2, "0"))
    after:   rows = wait_tensor(exchange_by_messages(grad, 2, "0"))
             own = sum(view(rows, [2, r, ...]), [0])
    or:      rows = wait_tensor(all_to_all_single(grad, [r, r], [r, r], "0")); own = sum(view(rows, [2, r, ...]), [0])

    Gathers always use messages, because gloo's own fail when two run at once, see `gather_by_messages`. Reductions use
    the form with the least seconds by `ctx.costs` (measured, if there is a calibration), including the sum on this
    rank; messages if two are equal or there is no measurement. All forms give the same numbers: received values are
    added in the order of ranks. gloo's own reduce-scatter adds in another order, and is chosen only between two ranks,
    where a sum is the same in any order. Several gradients of one unit of a step use messages, which can share a
    bucket. Shapes, groups and costs decide: all ranks choose the same.

    Left alone: NCCL and every other backend, all-reduces, reductions of tensors outside host memory (gloo sends only
    those by messages) or other than "sum", and the user's own with dynamic sizes.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        recordings = Recordings()
        gathers = _on_gloo(find_calls(gm, c10d_functional.all_gather_into_tensor.default), ctx)
        for started in gathers:
            _run_by(started, GATHERS["gather_by_messages"], recordings)
        reductions = _on_gloo(find_calls(gm, c10d_functional.reduce_scatter_tensor.default), ctx)
        reductions = [node for node in reductions if fake_value(node).device.type == "cpu"]
        predicted = {started: _predicted(started, ctx) for started in reductions if _is_sum_of_known_size(started)}
        chosen = _forms(predicted)
        rewritten = [started for started in predicted if chosen[started] != _OWN]
        for started in rewritten:
            _run_by(started, REDUCE_SCATTERS[chosen[started]], recordings)
        return PassResult(changed=len(gathers) + len(rewritten), notes=tuple(_notes_on_reductions(predicted, chosen)))


def _on_gloo(nodes: Iterable[Node], ctx: PassContext) -> list[Node]:
    # A user's own collective may name a group outside the mesh: not ours to change.
    groups = {axis.group for axis in ctx.axes if axis.backend == "gloo"}
    return [node for node in nodes if collective_group(node) in groups]


def _is_sum_of_known_size(started: Node) -> bool:
    sizes = fake_value(started).shape
    return bound_arguments(started)["reduce_op"] == "sum" and all(isinstance(size, int) for size in sizes)


def _predicted(started: Node, ctx: PassContext) -> dict[str, float]:
    """Return the seconds of a reduction in each form that gives the same numbers.

    Only messages if those are unknown.
    """
    ranks = bound_arguments(started)["group_size"]
    found = {}
    for kind in (_MESSAGES, _ALL_TO_ALL, _OWN) if ranks == 2 else (_MESSAGES, _ALL_TO_ALL):
        seconds = _seconds(started, kind, ctx)
        if seconds is None and kind == _MESSAGES:
            return {_MESSAGES: 0.0}
        if seconds is not None:
            moved = (ranks + 1) * number_of(started, tensor_bytes(fake_value(started)))  # reads all parts, writes one
            found[kind] = seconds + (kind != _OWN) * ctx.costs.kernel_seconds(0, moved)
    return found


def _seconds(started: Node, kind: str, ctx: PassContext) -> float | None:
    """Return the seconds of a reduce-scatter if it runs as another kind of collective with the same bytes."""
    group = collective_group(started)
    links = ctx.costs.links.get(group)
    sent = number_of(started, sent_bytes(started, ctx.axis(group).size) or 0)
    if links is None or not links.has(kind) or not sent:  # to send nothing, messages are not even started
        return None
    return ctx.costs.transfer_seconds(kind, group, sent)


def _forms(predicted: Mapping[Node, Mapping[str, float]]) -> dict[Node, str]:
    """Return the form of each reduction: messages where several gradients of a unit share them, else the fastest."""
    units = {started: computing_unit(started) for started in predicted}
    shared = {unit for unit, count in Counter(units.values()).items() if unit is not None and count > 1}
    return {
        started: _MESSAGES if units[started] in shared else min(seconds, key=lambda kind: seconds[kind])
        for started, seconds in predicted.items()  # of equals the first: messages
    }


def _notes_on_reductions(predicted: Mapping[Node, Mapping[str, float]], forms: Mapping[Node, str]) -> list[str]:
    """Return a note on the reductions in other forms than messages, with the predicted saving."""
    others = {started: form for started, form in forms.items() if form != _MESSAGES}
    saved = sum(predicted[started][_MESSAGES] - predicted[started][form] for started, form in others.items())
    kinds = " or ".join(sorted(set(others.values())))
    note = f"{len(others)} of {len(forms)} reductions use {kinds}, which is predicted to save {1e3 * saved:.3g} ms"
    return [note] if others else []


def _run_by(started: Node, algorithm: Gather | ReduceScatter, recordings: Recordings) -> None:
    """Replace a collective by another algorithm for the same: it starts and ends where the old one did."""
    call, wait = bound_arguments(started), wait_of(started)
    ranks = Ranks(call["group_name"], call["group_size"])

    def run(given: Tensor) -> Tensor:
        return algorithm(given, ranks).finish()

    *made, result = recordings.write(started, run, call["input"], algorithm, ranks)
    for node in made:
        inherit(node, started)
    for node in made[list(map(is_wait, made)).index(True) :]:
        wait.prepend(node)
    replace_and_erase(wait, result)
    started.graph.erase_node(started)
