"""The choice of cuts between pipeline stages in a captured graph."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch.fx import Graph, Node

from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.blocks import block_of, module_of

from .crossing_bytes import crossing_bytes

# How much more than the least possible the most loaded stage may cost, for cuts that fewer bytes cross.
SLACK = 0.03
# Cuts between blocks are chosen if the most loaded stage costs at most this multiple of the mean.
BALANCED = 1.10
# Most cuts for the program below, which looks at pairs of them: it takes seconds.
MOST_CUTS = 400

_NOTHING: Mapping[str, Collection[Node]] = {}


@dataclass(frozen=True)
class StagePlan:
    """The nodes of each stage.

    Attributes:
        stages: The nodes of each stage, in the graph's order; neither inputs, attributes nor the output.
        costs: The cost of each stage, in the unit of the nodes' costs.
        cut_bytes: Bytes that cross each boundary for one micro-batch, one way.
    """

    stages: tuple[tuple[Node, ...], ...]
    costs: tuple[float, ...]
    cut_bytes: tuple[int, ...]

    @property
    def balance(self) -> float:
        """The most loaded stage over the mean."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean if mean else 1.0


@dataclass(frozen=True)
class SplitStages:
    """Chooses the cuts between pipeline stages: the least bottleneck first, then the fewest bytes.

    before:  a = layers_0(x);  b = layers_1(a);  c = layers_2(b);  d = layers_3(c)
    after:   stage 0: a, b     stage 1: c, d     (stages=2)

    A dynamic program over the boundaries of repeated blocks, as in PipeDream (arXiv 1806.03377, section 3.1); over all
    legal places if the blocks do not balance.

    Attributes:
        stages: Number of stages.
        split: "auto", or the paths of the modules with which the second and later stages begin.
        seconds_per_byte: Time per byte of the link between stages, if costs are seconds: sending and receiving are then
            part of a stage's cost. 0: they are not.
        undivided: Paths of blocks inside which there is no cut.
    """

    stages: int
    split: str | Sequence[str] = "auto"
    seconds_per_byte: float = 0.0
    undivided: Collection[str] = ()

    def plan(
        self,
        graph: Graph,
        costs: Mapping[Node, float],
        repeated: Collection[Node] = (),
        together: Mapping[str, Collection[Node]] = _NOTHING,
    ) -> StagePlan:
        """Return the stages of a graph.

        Args:
            graph: A captured forward; each node's `meta["val"]` holds its fake value.
            costs: Cost of each node, in any unit; a missing node costs nothing.
            repeated: Nodes that each stage that reads them computes locally: they cross no boundary.
            together: Nodes that one stage must have, by the name of the buffer that they write.

        Raises:
            PassError: The graph has fewer legal stages, or a named split point is absent, illegal or out of order.
        """
        order = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        crossing = crossing_bytes(order, set(repeated), together.values())
        before = [0.0, *accumulate(costs.get(node, 0.0) for node in order)]
        # If nothing crosses, all nodes before the cut are repeated: that stage would compute nothing.
        legal = [at for at in range(1, len(order)) if 0 < crossing[at] < math.inf and not self._divides(order, at)]
        if self.split != "auto":
            return _planned(order, self._named(order, legal, together), before, crossing)
        blocks = [at for at in legal if _block(order[at - 1]) != _block(order[at])]
        chosen = self._choose(blocks, before, crossing)
        plan = _planned(order, chosen, before, crossing) if chosen else None
        if chosen is None or plan is None or plan.balance > BALANCED:
            wider = self._choose(sorted({*blocks, *_thinned(legal, before)}), before, crossing)
            if wider is None:
                raise PassError(
                    f"SplitStages: the graph can be cut at {len(legal)} places, and {self.stages} stages need "
                    f"{self.stages - 1}: use fewer stages{_written(together)}"
                )
            if (
                chosen is None
                or plan is None
                or self._slowest(wider, before, crossing) < self._slowest(chosen, before, crossing)
            ):
                plan = _planned(order, wider, before, crossing)
        return plan

    def _divides(self, order: Sequence[Node], at: int) -> bool:
        """Return True if a cut is inside a block of `undivided`."""
        before, after = _block(order[at - 1]), _block(order[at])
        return before is not None and before == after and ".".join(before) in self.undivided

    def _slowest(self, cuts: Sequence[int], before: Sequence[float], crossing: Sequence[float]) -> float:
        """Return the cost of the most loaded stage, with its sending and receiving."""
        bounds = [0, *cuts, len(before) - 1]
        prices = self._sending([0.0, *(crossing[cut] for cut in cuts), 0.0])
        spans = pairwise(zip(bounds, prices, strict=True))
        return max(before[end] - before[start] + paid + due for (start, paid), (end, due) in spans)

    def _sending(self, sizes: Sequence[float]) -> list[float]:
        """Return the cost of sending these bytes and as many back, as a share of a forward.

        Costs are those of forwards, and a backward costs twice as much: there are two transfers for three costs.
        """
        return [2 / 3 * size * self.seconds_per_byte for size in sizes]

    def _named(
        self, order: Sequence[Node], legal: Sequence[int], together: Mapping[str, Collection[Node]]
    ) -> list[int]:
        if len(self.split) != self.stages - 1:
            raise PassError(
                f"SplitStages: split has {len(self.split)} names, and {self.stages} stages need {self.stages - 1}, the "
                "first module of each stage but the first: change split or the number of stages"
            )
        starts: list[int] = []
        for name in self.split:
            inside = (at for at, node in enumerate(order) if f"{module_of(node)}.".startswith(f"{name}."))
            start = next(inside, None)
            if start is None:
                raise PassError(f"SplitStages: the forward calls no module {name!r}: name one that it calls")
            if start not in legal or (starts and start <= starts[-1]):
                raise PassError(
                    f"SplitStages: no stage can begin with {name!r}: name another module, in the order of calls"
                    f"{_written(_divided(order, start, together))}"
                )
            starts.append(start)
        return starts

    def _choose(self, cuts: Sequence[int], before: Sequence[float], crossing: Sequence[float]) -> list[int] | None:
        """Return the cuts of least bytes among those with the least bottleneck, within the slack; None if too few."""
        if len(cuts) < self.stages - 1:
            return None
        places = [0, *cuts, len(before) - 1]
        sums = [before[place] for place in places]
        sizes = [0.0, *(crossing[place] for place in cuts), 0.0]
        prices = self._sending(sizes)
        bottleneck, _ = _best(sums, sizes, prices, self.stages, math.inf)
        _, chosen = _best(sums, sizes, prices, self.stages, bottleneck * (1 + SLACK))
        return [places[at] for at in chosen]


def stages_by_parameters(
    graph: Graph,
    names: Mapping[str, str],
    *,
    stages: Mapping[str, Collection[int]],
    count: int,
    repeated: Collection[Node] = (),
    together: Mapping[str, Collection[Node]] = _NOTHING,
) -> StagePlan:
    """Return the stages of another forward of a model, whose parameters are on stages already.

    Between the last parameter of a stage and the first of the next one, the cut is where the fewest bytes cross.

    Args:
        graph: A captured forward; each node's `meta["val"]` holds its fake value.
        names: Placeholder of a parameter or buffer -> its name.
        stages: The stages that each parameter and buffer is on, by name.
        count: Number of stages.
        repeated: Nodes that each stage that reads them computes locally: they cross no boundary.
        together: Nodes that one stage must have, by the name of the buffer that they write.

    Raises:
        PassError: The forward reads parameters in another order than that of their stages, or cannot be cut there.
    """
    order = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    crossing = crossing_bytes(order, set(repeated), together.values())
    reads: list[tuple[int, int]] = []  # place, stage
    for place, node in enumerate(order):
        for read in node.all_input_nodes if node not in repeated else ():
            if read.name not in names:
                continue
            name = names[read.name]
            later = [stage for stage in stages[name] if not reads or stage >= reads[-1][1]]
            if not later:
                raise PassError(
                    f"stages: the forward reads {name!r} of stage {max(stages[name])} after parameters of stage "
                    f"{reads[-1][1]}, and the forward that was split did not. Read parameters in the same order, or "
                    "split the model so that one stage has both"
                )
            reads.append((place, min(later)))
    cuts = _cuts_between(reads, crossing, count, hint=_written(together))
    return _planned(order, cuts, [0.0] * (len(order) + 1), crossing)


def _cuts_between(reads: Sequence[tuple[int, int]], crossing: Sequence[float], count: int, *, hint: str) -> list[int]:
    """Return the cuts between the reads of parameters, as pairs of a place and a stage."""
    cuts: list[int] = []
    for stage in range(1, count):
        first = max([place + 1 for place, at in reads if at < stage] + cuts[-1:], default=0)
        last = min([place for place, at in reads if at >= stage], default=len(crossing) - 1)
        legal = [place for place in range(first, last + 1) if math.isfinite(crossing[place])]
        if not legal:
            raise PassError(
                f"stages: the forward cannot be cut between the parameters of stages {stage - 1} and {stage}, where "
                "it writes in place or passes on a value that is not a tensor. Change it, or split the model elsewhere"
                f"{hint}"
            )
        cuts.append(min(legal, key=lambda place: crossing[place]))
    return cuts


def _best(
    sums: Sequence[float], sizes: Sequence[float], prices: Sequence[float], stages: int, limit: float
) -> tuple[float, list[int]]:
    """Return the least bottleneck, or under a finite limit on it the fewest bytes; and the cuts for it."""
    last = len(sums) - 1
    best, come_from = [0.0] + [math.inf] * last, []
    for _ in range(stages):
        now, source = [math.inf] * (last + 1), [0] * (last + 1)
        for end in range(1, last + 1):
            for start in range(end):
                cost = sums[end] - sums[start] + prices[start] + prices[end]
                if cost > limit:
                    continue
                value = max(best[start], cost) if limit == math.inf else best[start] + sizes[start]
                if value < now[end]:
                    now[end], source[end] = value, start
        best = now
        come_from.append(source)
    cuts, at = [], last
    for source in reversed(come_from):
        at = source[at]
        cuts.append(at)
    return best[last], cuts[::-1][1:]


def _planned(
    order: Sequence[Node], cuts: Sequence[int], before: Sequence[float], crossing: Sequence[float]
) -> StagePlan:
    bounds = list(pairwise([0, *cuts, len(order)]))
    return StagePlan(
        tuple(tuple(order[start:end]) for start, end in bounds),
        tuple(before[end] - before[start] for start, end in bounds),
        tuple(int(crossing[cut]) for cut in cuts),
    )


def _divided(order: Sequence[Node], at: int, together: Mapping[str, Collection[Node]]) -> dict[str, Collection[Node]]:
    """Return the nodes that a cut would divide, though one stage must have them."""
    before = set(order[:at])
    return {name: nodes for name, nodes in together.items() if before & {*nodes} and {*nodes} - before}


def _written(together: Mapping[str, Collection[Node]]) -> str:
    """Return the end of an error: the buffers that one stage must write to."""
    names = ", ".join(map(repr, together))
    return f". The forward writes to {names}, and one stage must have all that writes to it" if names else ""


def _block(node: Node) -> tuple[str, str] | None:
    path = module_of(node)
    return block_of(path) if path else None


def _thinned(cuts: Sequence[int], before: Sequence[float]) -> list[int]:
    """Return at most `MOST_CUTS` of the cuts, evenly by cost."""
    step = before[-1] / MOST_CUTS
    kept: dict[int, int] = {}
    for cut in cuts:
        kept.setdefault(int(before[cut] / step) if step else 0, cut)
    return list(kept.values())
