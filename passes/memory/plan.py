"""The plan of a step's activations under `memory_limit`: found before a joint graph is split, checked behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.memory import simulate

from .assignment import Option, assign
from .forward_values import ForwardValues, read_forward_values
from .policies import Policy, policies_of
from .replay import Replay, replay

_NAMED = 4
"""So many parts are named one by one."""


@dataclass(frozen=True)
class PartPlan:
    """What becomes of one kind of part, for the report.

    Attributes:
        parts: Names of the parts.
        saved: Names of the nodes of the first of them that are saved.
        bytes: Bytes that one part saves.
        seconds: What computing the rest of it again takes.
    """

    parts: tuple[str, ...]
    saved: tuple[str, ...]
    bytes: int
    seconds: float

    def __str__(self) -> str:
        names = [name or "between blocks" for name in self.parts]
        where = ", ".join(names) if len(names) <= _NAMED else f"{names[0]} to {names[-1]} ({len(names)})"
        return (
            f"{where}: saves {self.bytes / 2**20:.2f} MiB each ({', '.join(self.saved) or 'nothing'}) and computes "
            f"{1e3 * self.seconds:.3f} ms again"
        )


@dataclass(frozen=True)
class Plan:
    """What is saved of each part.

    Attributes:
        numbers: The policy of each part.
        seconds: What computing the rest again takes, predicted.
        peak: The most bytes that the graph itself has alive at once, predicted.
        saved: What is saved.
        repeated: What is computed again.
    """

    numbers: tuple[int, ...]
    seconds: float
    peak: int
    saved: frozenset[Node]
    repeated: frozenset[Node]


class Planner:
    """The choices for one joint graph, found once; a plan for each limit."""

    def __init__(self, gm: GraphModule, costs: CostModel, *, outputs: int, fuses: bool) -> None:
        """Reads the graph and solves each kind of part.

        Args:
            gm: A joint graph behind its passes.
            costs: How long computing takes, the same on every rank.
            outputs: How many outputs are the model's.
            fuses: See `PassContext`.
        """
        self.values = read_forward_values(gm, simulate(gm, fused=fuses), costs, outputs=outputs, fuses=fuses)
        known: dict[object, list[Policy]] = {}
        self._policies = []
        for part in self.values.parts:
            if part.kind not in known:
                known[part.kind] = policies_of(part)
            self._policies.append(known[part.kind])
        self._choices = self._measured()

    @property
    def is_feasible(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._policies) and all(self._policies)

    def plan(self, limit: int | None) -> Plan | None:
        """The fastest plan under a limit of bytes that the graph itself has alive; None where none fits.

        Args:
            limit: None for the plan that needs the least memory.
        """
        numbers = assign(self._choices, limit) if self.is_feasible else None
        return None if numbers is None else self._as_plan(numbers)

    def _as_plan(self, numbers: Sequence[int]) -> Plan:
        chosen = [policies[number] for policies, number in zip(self._policies, numbers, strict=True)]
        saved = _nodes(self.values, chosen)
        found = replay(self.values, saved)
        return Plan(tuple(numbers), sum(item.seconds for item in chosen), found.peak, saved, found.repeated)

    def peak(self, saved: Collection[str]) -> int:
        """The most bytes that the graph itself has alive at once where the named values are saved."""
        return replay(self.values, [node for node in self.values.forward if node.name in saved]).peak

    def names(self, plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of what is saved, and of what is computed again, in program order."""
        saved = [node.name for node in self.values.forward if node in plan.saved and self.values.values[node].bytes]
        return tuple(saved), tuple(node.name for node in self.values.forward if node in plan.repeated)

    def lines(self, plan: Plan) -> tuple[PartPlan, ...]:
        """The plan for the report: parts of one kind with the same policy together."""
        alike: dict[object, list[int]] = {}
        for number, (part, policy) in enumerate(zip(self.values.parts, plan.numbers, strict=True)):
            alike.setdefault((part.kind, policy), []).append(number)
        return tuple(self._line(plan, numbers) for numbers in alike.values())

    def _line(self, plan: Plan, numbers: Sequence[int]) -> PartPlan:
        first = numbers[0]
        part, policy = self.values.parts[first], self._policies[first][plan.numbers[first]]
        names = tuple(part.values[at].node.name for at in sorted(policy.saved) if part.values[at].bytes)
        parts = tuple(self.values.parts[number].name for number in numbers)
        return PartPlan(parts, names, policy.bytes, policy.seconds)

    def _measured(self) -> list[list[Option]]:
        """What each policy of each part needs: steps in which all parts take one of about the same rank."""
        most = max(map(len, self._policies), default=0)
        choices: list[list[Option]] = [[] for _ in self._policies]
        for rank in range(most):
            picked = [policies[min(rank, len(policies) - 1)] for policies in self._policies if policies]
            if len(picked) < len(self._policies):
                return choices
            found = replay(self.values, _nodes(self.values, picked))
            for number, (forward, backward) in _needs(found, len(picked)).items():
                if rank < len(self._policies[number]):
                    choices[number].append(Option(picked[number].seconds, found.saved[number], forward, backward))
        return choices


def _needs(found: Replay, parts: int) -> Mapping[int, tuple[int, int]]:
    """What each part needs in the forward and in the backward, beside what is saved until then."""
    before = [sum(found.saved[:number]) for number in range(parts + 1)]
    forward, backward = [0] * parts, [0] * parts
    for live, number in zip(found.forward, found.forward_parts, strict=True):
        forward[number] = max(forward[number], live - before[number])
    for live, number in zip(found.backward, found.backward_parts, strict=True):
        backward[number] = max(backward[number], live - before[number + 1])
    return {number: (forward[number], backward[number]) for number in range(parts)}


def _nodes(values: ForwardValues, policies: Sequence[Policy]) -> frozenset[Node]:
    return frozenset(
        part.values[at].node for part, policy in zip(values.parts, policies, strict=True) for at in policy.saved
    )
