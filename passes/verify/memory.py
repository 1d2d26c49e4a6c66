"""Rules for a graph's memory: writes, the order of reads and writes, barriers, releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.coalesced import is_result
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import is_barrier, is_wait
from dsgraph.passes.ir.op_traits import allocates, argument_nodes, is_unknown, releases, traits, written_nodes

Roots = frozenset[Node]
_NONE: Roots = frozenset()


@dataclass(frozen=True)
class MemoryFacts:
    """The sharing of memory in a graph, and the writes to it.

    Attributes:
        single_roots: For each node, the one whose memory it uses: itself, if it is a tensor of its own.
        joint_roots: For nodes that may use the memory of several nodes, these.
        input_writes: Per input that the graph writes to, the calls that write to it, in program order.
        ordered: Barriers, collectives and waits, in program order.
        accesses: Per root that is written to, the nodes that read or write it, in program order.
        writers: Nodes that write to something.
        released: Nodes that read released memory, each with the node that had released it.
    """

    single_roots: Mapping[Node, Node] = field(default_factory=dict)
    joint_roots: Mapping[Node, Roots] = field(default_factory=dict)
    input_writes: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)
    ordered: tuple[Node, ...] = ()
    accesses: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    writers: frozenset[Node] = frozenset()
    released: tuple[tuple[Node, Node], ...] = ()

    def __contains__(self, node: object) -> bool:
        """Return whether the node is in the graph."""
        return node in self.single_roots

    def roots(self, node: Node) -> Roots:
        """Return the nodes whose memory the value of `node` may use."""
        return self.joint_roots.get(node) or frozenset((self.single_roots[node],))


def observe(gm: GraphModule) -> MemoryFacts:
    """Return the facts of one graph."""
    single: dict[Node, Node] = {}
    joint: dict[Node, Roots] = {}
    sharing = MemoryFacts(single, joint)  # grows below
    ordered: list[Node] = []
    barriers: list[Node] = []
    for node in gm.graph.nodes:
        shares = traits(node).shares
        sources = tuple(argument_nodes(node, shares)) if shares and not _is_new_result(node) else ()
        single[node] = single[sources[0]] if sources else node
        if len(sources) > 1 or (sources and sources[0] in joint):
            joint[node] = _union(sharing.roots(source) for source in sources)
        if node.op.startswith("call_") and is_barrier(node):
            ordered.append(node)
            barriers.append(node)
        elif is_collective(node) or is_wait(node):
            ordered.append(node)
    writers = [node for node in barriers if any(True for _ in written_nodes(node))]
    gives_back = any(releases(node) is not None for node in writers)
    return MemoryFacts(
        single_roots=single,
        joint_roots=joint,
        input_writes=_input_writes(writers, sharing),
        ordered=tuple(ordered),
        accesses=_accesses(gm, writers, sharing) if writers else {},
        writers=frozenset(writers),
        released=tuple(_reads_after_release(gm, sharing)) if gives_back else (),
    )


def _is_new_result(node: Node) -> bool:
    """Return whether the node is a new tensor, one of several that a coalesced collective makes."""
    return is_result(node) and not traits(node.all_input_nodes[0]).shares


def _union(sets: Iterable[Roots]) -> Roots:
    result = _NONE
    for one in sets:
        result = one if not result else result | one
    return result


def _input_writes(writers: Iterable[Node], memory: MemoryFacts) -> dict[str, tuple[Node, ...]]:
    found: dict[str, tuple[Node, ...]] = {}
    for writer in writers:
        for root in _union(memory.roots(node) for node in written_nodes(writer)):
            if root.op == "placeholder" and not is_unknown(writer):
                found[root.name] = (*found.get(root.name, ()), writer)
    return found


def _accesses(gm: GraphModule, writers: Iterable[Node], memory: MemoryFacts) -> dict[Node, tuple[Node, ...]]:
    found: dict[Node, list[Node]] = {
        root: [] for writer in writers for node in written_nodes(writer) for root in memory.roots(node)
    }
    for node in gm.graph.nodes:
        known = traits(node)
        if known.reads or known.writes:
            for root in _union(memory.roots(source) for source in node.all_input_nodes):
                if root in found:
                    found[root].append(node)
    return {root: tuple(nodes) for root, nodes in found.items()}


def _reads_after_release(gm: GraphModule, memory: MemoryFacts) -> Iterator[tuple[Node, Node]]:
    gone: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        given = allocates(node)
        if given is not None:
            for root in memory.roots(given):
                gone.pop(root, None)
            continue
        released = releases(node)
        if released is not None:
            gone.update(dict.fromkeys(memory.roots(released), node))
        elif gone and (traits(node).reads or node.op == "output"):
            for source in node.all_input_nodes:
                if node.op == "output" and source.op == "placeholder":
                    continue  # handing an input on does not read it
                for root in memory.roots(source) & gone.keys():
                    yield node, gone[root]


def check(before: MemoryFacts, after: MemoryFacts, who: str) -> None:
    """Compare the facts of a graph before and after a pass.

    Raises:
        PassError: A write to an input was lost or doubled, or something moved across a barrier or a write.
    """
    _check_input_writes(before, after, who)
    _check_barriers(before, after, who)
    _check_reads(before, after, who)


def _check_input_writes(before: MemoryFacts, after: MemoryFacts, who: str) -> None:
    for name in {**before.input_writes, **after.input_writes}:
        was, now = before.input_writes.get(name, ()), after.input_writes.get(name, ())
        if len(was) == len(now):
            continue
        lost = ", ".join(node.name for node in was if node not in after)
        new = ", ".join(node.name for node in now if node not in before)
        detail = "; ".join(part for part in (f"gone: {lost}" if lost else "", f"new: {new}" if new else "") if part)
        raise PassError(
            f"{who} changed how often the graph writes to input {name!r} from {len(was)} to {len(now)} times "
            f"({detail}); what the model writes to its inputs must happen once: keep those nodes"
        )


def _check_barriers(before: MemoryFacts, after: MemoryFacts, who: str) -> None:
    is_stopped: Callable[[Node], bool] = lambda node: is_collective(node) or is_wait(node) or is_unknown(node)  # noqa: E731
    crossed = _first_crossing(before.ordered, after.ordered, is_barrier, is_stopped)
    if crossed is not None:
        node, barrier = crossed
        kind = "may do anything" if is_unknown(barrier) else "writes to an argument"
        raise PassError(
            f"{who} moved {node.name} ({_name_of(node)}) across {barrier.name} ({_name_of(barrier)}), which {kind}; "
            "collectives, waits and unknown ops must stay on their side of a barrier: "
            "ask dsgraph.passes.ir.graph.barrier_between before moving a node"
        )


def _check_reads(before: MemoryFacts, after: MemoryFacts, who: str) -> None:
    for root, was in before.accesses.items():
        now = after.accesses.get(root)
        if now is None:
            continue
        crossed = _first_crossing(was, now, after.writers.__contains__, lambda node: True)
        if crossed is not None:
            node, writer = crossed
            raise PassError(
                f"{who} moved {node.name} ({_name_of(node)}) across {writer.name} ({_name_of(writer)}), though both "
                f"use the memory of {root.name} and {writer.name} writes to it; keep reads and writes of one tensor "
                "and its views in their order"
            )


def _first_crossing(
    was: tuple[Node, ...], now: tuple[Node, ...], is_fence: Callable[[Node], bool], is_stopped: Callable[[Node], bool]
) -> tuple[Node, Node] | None:
    """Return a node that was on another side of a fence before, and that fence; for nodes in both lists."""
    common = set(was) & set(now)
    sides_before = dict(_sides(was, common, is_fence))
    sides_after = dict(_sides(now, common, is_fence))
    for node, side in sides_after.items():
        if side == sides_before[node] or not is_stopped(node):
            continue
        fences_before = set(_fences_ahead(was, node, common, is_fence))
        fences_after = set(_fences_ahead(now, node, common, is_fence))
        for fence in (fence for fence in was if fence in fences_before ^ fences_after):
            return node, fence
    return None


def _sides(
    nodes: Iterable[Node], common: set[Node], is_fence: Callable[[Node], bool]
) -> Iterator[tuple[Node, tuple[int, int]]]:
    """Yield for each node the number of fences before it, and a sum that distinguishes sets of as many fences."""
    count = total = 0
    for node in nodes:
        if node in common:
            yield node, (count, total)
            if is_fence(node):
                count, total = count + 1, total + hash(node)


def _fences_ahead(
    nodes: Iterable[Node], last: Node, common: set[Node], is_fence: Callable[[Node], bool]
) -> Iterator[Node]:
    for node in nodes:
        if node is last:
            return
        if node in common and is_fence(node):
            yield node


def _name_of(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
