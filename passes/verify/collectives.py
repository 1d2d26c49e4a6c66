"""Rules for a graph's communication: waits, kinds, order, and the moments of gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.coalesced import inputs_of, is_result, results_of
from dsgraph.passes.ir.collectives import Role, collective_group, has_role, is_collective
from dsgraph.passes.ir.gathers import PREPARATIONS
from dsgraph.passes.ir.graph import KEPT, bound_arguments, is_gather_marker, is_view, is_wait
from dsgraph.passes.ir.parameters import AxisRole
from dsgraph.passes.ir.save_plan import Choice, must
from dsgraph.passes.ir.transfers import is_taken

from .in_flight import Violation, writes_in_flight
from .memory import MemoryFacts

aten = torch.ops.aten


@dataclass(frozen=True)
class CollectiveFacts:
    """The communication of a graph.

    Attributes:
        signatures: Each collective and marker with its properties: op, group, reduce op, sizes.
        per_group: Per process group, the collectives in program order.
        gathers: Per input, the groups over which it is gathered.
        recomputed: Inputs all of whose gathers are tagged for recomputation; only in joint graphs, as for all tags.
        tagged: Gathered parameters and views of them that are tagged for recomputation.
        untagged: Untagged views of tagged nodes, in the forward.
        violations: Rules that this graph breaks, whatever it was before.
    """

    signatures: Mapping[Node, str] = field(default_factory=dict)
    per_group: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)
    gathers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()
    tagged: frozenset[Node] = frozenset()
    untagged: frozenset[Node] = frozenset()
    violations: tuple[Violation, ...] = ()


def observe(gm: GraphModule, memory: MemoryFacts, outputs: list[object], ctx: PassContext) -> CollectiveFacts:
    """Return the communication of one graph."""
    started = [node for node in memory.ordered if is_collective(node)]
    markers = [
        *gm.graph.find_nodes(op="call_function", target=torch.ops.dsgraph.gather_param.default),
        *gm.graph.find_nodes(op="call_function", target=torch.ops.dsgraph.reduce_grad.default),
        *gm.graph.find_nodes(op="call_function", target=torch.ops.dsgraph.reduce_compressed.default),
    ]
    if not started and not markers:
        return CollectiveFacts()
    per_group: dict[str, list[Node]] = {}
    for node in started:
        per_group.setdefault(collective_group(node), []).append(node)
    gathers, recomputed = _gathers(started, markers, ctx)
    tagged, untagged = _tags(started) if ctx.phase is Phase.JOINT else (frozenset(), frozenset())
    return CollectiveFacts(
        signatures={node: _signature(node) for node in (*started, *markers)},
        per_group={group: tuple(nodes) for group, nodes in per_group.items()},
        gathers=gathers,
        recomputed=recomputed if ctx.phase is Phase.JOINT else frozenset(),
        tagged=tagged,
        untagged=untagged,
        violations=(
            *_wrong_waits(started),
            *writes_in_flight(gm, memory),
            *_saved_gathers(started, memory, outputs, ctx),
        ),
    )


def _signature(node: Node) -> str:
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: None)
    return f"{target.__name__.removesuffix('.default')}{args}{kwargs or ''}"


def _gathers(
    started: list[Node], markers: list[Node], ctx: PassContext
) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    # Over other groups slices and activations are gathered, which have no markers.
    groups = {axis.group for axis in ctx.axes if axis.size > 1 and axis.role is not AxisRole.TENSOR}
    gathers: dict[str, frozenset[str]] = {}
    repeated: dict[str, bool] = {}
    for node in (*started, *markers):
        if is_gather_marker(node):
            call = bound_arguments(node)
            source, group = call["shard"], call["group"] if call["gathered_copy"] is None else ""
        elif has_role(node, Role.GATHER):
            source, group = None, collective_group(node)
        else:
            continue
        if group not in groups:
            continue
        for result in results_of(node):
            is_repeated = _is_tagged(node) and all(map(_is_tagged, (result, *result.users)))
            made_of = inputs_of(result) if source is None else [source]
            for name in (name for shard in made_of for name in _inputs_of(shard)):
                gathers[name] = gathers.get(name, frozenset()) | {group}
                repeated[name] = repeated.get(name, True) and is_repeated
    return gathers, frozenset(name for name, is_repeated in repeated.items() if is_repeated)


def _inputs_of(node: Node) -> list[str]:
    """Return the inputs that a shard is computed from; none if it depends on anything else as well."""
    found, frontier = [], [node]
    while frontier:
        node = frontier.pop()
        if node.op == "placeholder":
            found.append(node.name)
        elif is_taken(node):
            frontier.append(node.all_input_nodes[-1])
        elif is_view(node) or node.target in (*PREPARATIONS, aten.clone.default, aten.cat.default):
            frontier.extend(node.all_input_nodes)
        else:
            return []
    return found


def _is_tagged(node: Node) -> bool:
    return must(node, Choice.RECOMPUTE)


def _tags(started: list[Node]) -> tuple[frozenset[Node], frozenset[Node]]:
    tagged: set[Node] = set()
    untagged: set[Node] = set()
    frontier = [node for node in started if has_role(node, Role.GATHER) and _is_tagged(node)]
    while frontier:
        node = frontier.pop()
        if _is_tagged(node):
            tagged.add(node)
            frontier.extend(user for user in node.users if is_wait(user) or is_view(user) or is_result(user))
        elif not node.meta.get(KEPT) and node.meta.get("partitioner_tag") != "is_backward":
            untagged.add(node)
    return frozenset(tagged), frozenset(untagged)


def _wrong_waits(started: list[Node]) -> Iterator[Violation]:
    for node in started:
        # Several tensors at once are waited for one by one.
        value = node.meta.get("val")
        results = list(node.users) if isinstance(value, (list, tuple)) else [node]
        read = {result.args[1] for result in results if is_result(result)}
        if isinstance(value, (list, tuple)) and len(read) < len(value):
            yield (
                f"results {node.name}",
                f"collective {node.name} has {len(value)} results, of which {len(read)} are read; each must have its "
                "one wait",
            )
        for result in results:
            waits = sum(map(is_wait, result.users))
            if waits != 1 or len(result.users) != 1:
                yield (
                    f"wait {node.name}",
                    f"collective {node.name} has {waits} waits and {len(result.users)} users; its one user must be its "
                    "one wait, and whatever reads the result must read that wait",
                )


def _saved_gathers(
    started: list[Node], memory: MemoryFacts, outputs: list[object], ctx: PassContext
) -> Iterator[Violation]:
    if ctx.user_outputs is None:
        return
    gathered = {
        item for node in started if has_role(node, Role.GATHER) and _is_tagged(node) for item in results_of(node)
    }
    kept = {node for node in gathered if any(user.meta.get(KEPT) for user in node.users)}
    for index, value in enumerate(outputs[ctx.user_outputs :], start=ctx.user_outputs):
        for root in memory.roots(value) & (gathered - kept) if isinstance(value, Node) else ():
            yield (
                f"saved {root.name}",
                f"output {index} ({value}) saves the full parameter that {root.name} gathers for the backward, which "
                "gathers it again; an op that views it lost its tag: copy meta['recompute'] to the nodes that replace "
                "tagged ones, or declare keeps_gathers",
            )


def check(before: CollectiveFacts, after: CollectiveFacts, graph_pass: GraphPass, memory: MemoryFacts) -> None:
    """Compare the communication of a graph before and after a pass; `memory` is that after it.

    Raises:
        PassError: A collective was added, removed, changed or moved, or a gather is no longer repeated, without a
            declaration.
    """
    if not graph_pass.changes_collectives:
        _check_signatures(before, after, graph_pass)
    if not graph_pass.reorders_collectives:
        _check_order(before, after, graph_pass)
    _check_gathers(before, after, graph_pass)
    if not graph_pass.keeps_gathers:
        _check_tags(before, after, graph_pass, memory)


def _check_signatures(before: CollectiveFacts, after: CollectiveFacts, graph_pass: GraphPass) -> None:
    for node, was in before.signatures.items():
        now = after.signatures.get(node, was)
        if was != now:
            raise PassError(
                f"pass {graph_pass.name} changed collective {node.name} from {was} to {now} without declaring "
                "changes_collectives"
            )
    gone = {node: was for node, was in before.signatures.items() if node not in after.signatures}
    new = {node: now for node, now in after.signatures.items() if node not in before.signatures}
    if Counter(gone.values()) == Counter(new.values()):  # made again
        return
    changes = [f"removed {node.name} ({was})" for node, was in gone.items()]
    changes += [f"added {node.name} ({now})" for node, now in new.items()]
    raise PassError(
        f"pass {graph_pass.name} {' and '.join(changes[:3])}{', ...' if len(changes) > 3 else ''} without declaring "
        "changes_collectives; every rank must run the same collectives"
    )


def _check_order(before: CollectiveFacts, after: CollectiveFacts, graph_pass: GraphPass) -> None:
    for group, nodes in before.per_group.items():
        now, was = after.per_group.get(group, ()), set(nodes)
        kept_after = [node for node in now if node in was]
        still = set(kept_after)
        kept_before = [node for node in nodes if node in still]
        pairs = list(zip(kept_before, kept_after, strict=True))
        if not graph_pass.changes_collectives:  # recreated nodes are compared by their effect
            pairs += [(a, b) for a, b in zip(nodes, now, strict=False) if before.signatures[a] != after.signatures[b]]
        for expected, found in pairs:
            if expected is not found:
                raise PassError(
                    f"pass {graph_pass.name} moved collective {found.name} before {expected.name} in group {group!r} "
                    "without declaring reorders_collectives"
                )


def _check_gathers(before: CollectiveFacts, after: CollectiveFacts, graph_pass: GraphPass) -> None:
    for name in {**before.gathers, **after.gathers}:
        was, now = before.gathers.get(name, frozenset()), after.gathers.get(name, frozenset())
        if was != now:
            raise PassError(
                f"pass {graph_pass.name} changed the groups over which input {name!r} is gathered from "
                f"{sorted(was) or 'none'} to {sorted(now) or 'none'}; a parameter is gathered over the group that its "
                "marker names"
            )


def _check_tags(before: CollectiveFacts, after: CollectiveFacts, graph_pass: GraphPass, memory: MemoryFacts) -> None:
    lost = [node.name for node in before.tagged if node in memory and not _is_tagged(node)]
    lost += sorted(name for name in before.recomputed & after.gathers.keys() if name not in after.recomputed)
    lost += [node.name for node in after.untagged if node not in before.untagged]
    if lost:
        raise PassError(
            f"pass {graph_pass.name} keeps the gathered parameter of {lost[0]} for the backward, which is to gather it "
            "again: meta['recompute'] is missing; copy it to the nodes that replace tagged ones, or declare "
            "keeps_gathers"
        )
