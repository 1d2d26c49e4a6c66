"""The plan of a step's activations under `memory_limit`: found before a joint graph is split, checked after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.cost import CostModel, flop_formula
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.save_plan import is_recomputed

from .assignment import Option, assign, needs
from .forward_values import ForwardValues, read_forward_values
from .policies import Policy, TransferPolicy, least_saved_bytes, policies_of
from .replay import Replay, ReplayedGraph, replay

_NAMED = 4
"""Number of parts that are named one by one."""


@dataclass(frozen=True)
class PartPlan:
    """The plan of one kind of part, for the report.

    Attributes:
        parts: Names of the parts.
        saved: Names of the nodes of the first of them that are saved.
        bytes: Bytes that one part saves.
        seconds: Time of recomputing the rest of it, and of transfers that nothing hides.
        offloaded: Names of the nodes of the first of them that are offloaded.
        offloaded_bytes: Their bytes.
    """

    parts: tuple[str, ...]
    saved: tuple[str, ...]
    bytes: int
    seconds: float
    offloaded: tuple[str, ...] = ()
    offloaded_bytes: int = 0

    def __str__(self) -> str:
        names = self.parts
        where = ", ".join(names) if len(names) <= _NAMED else f"{names[0]} to {names[-1]} ({len(names)})"
        away = f"offloads {self.offloaded_bytes / 2**20:.2f} MiB ({', '.join(self.offloaded)}), "
        return (
            f"{where}: saves {self.bytes / 2**20:.2f} MiB each ({', '.join(self.saved) or 'nothing'}), "
            f"{away if self.offloaded else ''}recomputing takes {1e3 * self.seconds:.3f} ms"
        )


@dataclass(frozen=True)
class StepPlan:
    """The plan for all parts.

    Attributes:
        numbers: The policy of each part.
        seconds: Predicted time of recomputing the rest.
        needs: Bytes of the least limit under which this plan is found.
        peak: The most bytes that the graph itself has alive at once, predicted.
        saved: The saved values.
        repeated: The recomputed values.
        offloaded: The offloaded values.
    """

    numbers: tuple[int, ...]
    seconds: float
    needs: int
    peak: int
    saved: frozenset[Node]
    repeated: frozenset[Node]
    offloaded: frozenset[Node]


class Planner:
    """The choices for one joint graph, found once; a plan for each limit."""

    def __init__(
        self,
        gm: GraphModule,
        costs: CostModel,
        *,
        outputs: int,
        fuses: bool,
        transfers: TransferPolicy | None = None,
        in_flight: int = 1,
    ) -> None:
        """Read the graph and solve each kind of part.

        Args:
            gm: A joint graph after its passes.
            costs: The cost model, the same on every rank.
            outputs: Number of outputs that are the model's.
            fuses: See `PassContext`.
            transfers: How values may be offloaded; None if they may not.
            in_flight: Number of runs of the graph whose saved values are in memory at once.
        """
        self._in_flight = in_flight
        self.values = read_forward_values(gm, simulate(gm, fused=fuses), costs, outputs=outputs, fuses=fuses)
        self._graph = ReplayedGraph(self.values)
        known: dict[object, list[Policy]] = {}
        self._policies = []
        for part in self.values.parts:
            if part.kind not in known:
                known[part.kind] = policies_of(part, transfers)
            self._policies.append(known[part.kind])
        self._choices = self._measured()

    @property
    def is_feasible(self) -> bool:
        """True if there is anything to choose."""
        return bool(self._policies) and all(self._policies)

    def plan(self, limit: int | None) -> StepPlan | None:
        """Return the fastest plan under a limit of bytes that the graph itself has alive; None if none fits.

        Args:
            limit: None for the plan that needs the least memory.
        """
        numbers = assign(self._choices, limit, in_flight=self._in_flight) if self.is_feasible else None
        return None if numbers is None else self._as_plan(numbers)

    def _as_plan(self, numbers: Sequence[int]) -> StepPlan:
        chosen = [policies[number] for policies, number in zip(self._policies, numbers, strict=True)]
        saved, offloaded = _nodes(self.values, chosen)
        found = replay(self._graph, saved, offloaded)
        return StepPlan(
            numbers=tuple(numbers),
            seconds=sum(item.seconds for item in chosen),
            needs=needs(
                [options[number] for options, number in zip(self._choices, numbers, strict=True)],
                in_flight=self._in_flight,
            ),
            peak=self._peak(found),
            saved=saved,
            repeated=found.repeated,
            offloaded=offloaded,
        )

    def least_saved_bytes(self) -> int:
        """Return a lower bound of the bytes that torch's partitioner saves by default; 0 if there is nothing to choose.

        By default it recomputes no collective, matrix product, convolution or attention, and nothing that one of these
        reads in the backward.
        """
        if not self.is_feasible:
            return 0
        costly = _costly(self.values)
        read = {source for node in self.values.gradients for source in node.all_input_nodes}
        known: dict[object, int] = {}
        total = 0
        for part in self.values.parts:
            key = part.kind, tuple((value.node in read, value.node in costly) for value in part.values)
            if key not in known:
                known[key] = least_saved_bytes(part, read=read, costly=costly)
            total += known[key]
        return self._in_flight * total

    def peak(self, saved: Collection[str]) -> int:
        """Return the peak bytes of the graph itself if the named values are saved."""
        return self._peak(replay(self._graph, [node for node in self.values.forward if node.name in saved]))

    def _peak(self, found: Replay) -> int:
        return found.peak + (self._in_flight - 1) * sum(found.saved)

    def names(self, plan: StepPlan) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return the names of saved, recomputed and offloaded values, in program order."""
        forward, values = self.values.forward, self.values.values
        saved = tuple(node.name for node in forward if node in plan.saved and values[node].bytes)
        repeated = tuple(node.name for node in forward if node in plan.repeated)
        return saved, repeated, tuple(node.name for node in forward if node in plan.offloaded)

    def lines(self, plan: StepPlan) -> tuple[PartPlan, ...]:
        """Return the plan for the report: parts of one kind with the same policy together."""
        alike: dict[object, list[int]] = {}
        for number, (part, policy) in enumerate(zip(self.values.parts, plan.numbers, strict=True)):
            alike.setdefault((part.kind, policy), []).append(number)
        return tuple(self._line(plan, numbers) for numbers in alike.values())

    def _line(self, plan: StepPlan, numbers: Sequence[int]) -> PartPlan:
        first = numbers[0]
        part, policy = self.values.parts[first], self._policies[first][plan.numbers[first]]
        names = tuple(part.values[at].node.name for at in sorted(policy.saved) if part.values[at].bytes)
        rest = "between blocks" if any(part.name for part in self.values.parts) else "the graph"
        parts = tuple(self.values.parts[number].name or rest for number in numbers)
        away = [part.values[at] for at in sorted(policy.offloaded)]
        left = tuple(value.node.name for value in away), sum(value.bytes for value in away)
        return PartPlan(parts, names, policy.bytes, policy.seconds, *left)

    def _measured(self) -> list[list[Option]]:
        """Return the needs of each policy of each part, from steps in which all parts use one of similar rank."""
        most = max(map(len, self._policies), default=0)
        choices: list[list[Option]] = [[] for _ in self._policies]
        for rank in range(most):
            picked = [policies[min(rank, len(policies) - 1)] for policies in self._policies if policies]
            if len(picked) < len(self._policies):
                return choices
            found = replay(self._graph, *_nodes(self.values, picked))
            for number, (forward, backward) in _needs(found, len(picked)).items():
                if rank < len(self._policies[number]):
                    choices[number].append(Option(picked[number].seconds, found.saved[number], forward, backward))
        return choices


def _needs(found: Replay, parts: int) -> Mapping[int, tuple[int, int]]:
    """Return the bytes that each part needs in the forward and in the backward, beside the values saved until then."""
    before = [sum(found.saved[:number]) for number in range(parts + 1)]
    forward, backward = [0] * parts, [0] * parts
    for live, number in zip(found.forward, found.forward_parts, strict=True):
        forward[number] = max(forward[number], live - before[number])
    for live, number in zip(found.backward, found.backward_parts, strict=True):
        backward[number] = max(backward[number], live - before[number + 1])
    return {number: (forward[number], backward[number]) for number in range(parts)}


def _costly(values: ForwardValues) -> set[Node]:
    """Return the nodes that torch's partitioner does not recompute by default, with some nodes of the backward."""
    found = {node for node in values.gm.graph.nodes if is_collective(node) or flop_formula(node.target) is not None}
    sources = [source for node in found & values.gradients for source in node.all_input_nodes]
    for source in sources:
        value = values.values.get(source)
        if value is not None and value.bytes:
            found.add(source)
        elif value is not None:  # a view
            sources += source.all_input_nodes
    return {node for node in found if not is_recomputed(node)}


def _nodes(values: ForwardValues, policies: Sequence[Policy]) -> tuple[frozenset[Node], frozenset[Node]]:
    """Return the saved and the offloaded nodes."""
    pairs = list(zip(values.parts, policies, strict=True))
    saved = frozenset(part.values[at].node for part, policy in pairs for at in policy.saved)
    return saved, frozenset(part.values[at].node for part, policy in pairs for at in policy.offloaded)
