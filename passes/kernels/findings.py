"""The results of SubstituteKernels for a graph, kernel by kernel, and their notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from dsgraph.passes.core.notes import user_line
from dsgraph.passes.ir.graph import all_graph_modules, find_calls

from .spec import Gain, KernelSpec

NOWHERE = "was requested, but is not used in this graph"
"""How the note on a kernel ends that was looked for in vain."""


@dataclass
class Findings:
    """The results for a graph, kernel by kernel."""

    substituted: Counter[str] = field(default_factory=Counter)
    gains: dict[str, Gain] = field(default_factory=dict)
    left: dict[tuple[str, str], int] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    caveats: dict[str, dict[str, None]] = field(default_factory=dict)
    erased: set[Node] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)  # kernels that a larger one has taken a place from

    def substitute(self, spec: KernelSpec, gain: Gain, *, caveat: str) -> None:
        self.substituted[spec.name] += 1
        if caveat:
            self.caveats.setdefault(spec.name, {})[caveat] = None
        before = self.gains.get(spec.name, Gain(0, 0, ""))
        self.gains[spec.name] = Gain(before.kernels + gain.kernels, before.bytes + gain.bytes, gain.why)

    def leave(self, spec: KernelSpec, gain: Gain) -> None:
        self.left[spec.name, gain.why] = self.left.get((spec.name, gain.why), 0) + 1

    def miss(self, spec: KernelSpec, node: Node, reason: str) -> None:
        self.misses.append(f"{spec.name} is not substituted{user_line(node)}: {reason}")

    def note_absent(self, kernels: Sequence[KernelSpec], gm: GraphModule) -> None:
        for spec in kernels:
            if not self.substituted[spec.name] and spec.name not in self.taken:
                self.misses.append(f"{spec.name} {_calls_already(spec, gm) or NOWHERE}")

    @property
    def notes(self) -> list[str]:
        left = [
            f"{name} is not substituted in {count} {'place' if count == 1 else 'places'}, because nothing is gained: "
            f"{why}"
            for (name, why), count in self.left.items()
        ]
        return [*self.misses, *left]

    def done(self) -> list[str]:
        lines = []
        for name, count in self.substituted.items():
            gain = self.gains[name]
            spared = [f"{gain.kernels} kernels"] * (gain.kernels > 0) + [f"{gain.bytes:,} bytes"] * (gain.bytes > 0)
            expected = f"saves {' and '.join(spared)}" if spared else "because it was requested"
            line = f"{name} in {count} {'place' if count == 1 else 'places'}, {expected}: {gain.why}"
            lines.append("; ".join([line, *self.caveats.get(name, ())]))
        return lines


def _calls_already(spec: KernelSpec, gm: GraphModule) -> str:
    """Return where the graph calls torch's function for the same, as the end of a note; empty if nowhere."""
    if spec.already is None:
        return ""
    calls = sum(len(find_calls(module, spec.already)) for module in all_graph_modules(gm))
    where = f"{calls} {'place' if calls == 1 else 'places'}"
    return f"is not substituted: the graph already calls torch's {spec.already.__name__}, in {where}" * (calls > 0)
