"""How a graph is compiled unless a tool was chosen: its passes, and the code generator that the options name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from dsgraph.passes import CaptureFacts
from dsgraph.passes.memory.fit import Agree, Proposal, alone, decide
from dsgraph.ranks.agreement import Agreement
from dsgraph.utils.json_records import from_json_text, to_json_text

from .codegen import Compilation
from .options import BackendOptions
from .request import CompileOutcome, CompileRequest, CompileWatch


@dataclass(frozen=True)
class Usual:
    """The choice of those who choose nothing."""

    def facts(self, facts: CaptureFacts, options: BackendOptions) -> CaptureFacts:
        """The graph runs where it was captured."""
        return facts

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> UsualCompiler:
        """What compiles the graph of `request`."""
        agree: Agree = alone
        facts = request.facts
        if facts.keeps_limit and request.agreement is not None and len(request.agreement.ranks) > 1:
            # Bound to nothing that holds the graph's inputs: what is compiled outlives them.
            lines = "\n".join(["plan", f"within {facts.memory_limit}", *request.lines])
            agree = partial(_agree, request.agreement, lines)
        made = Compilation(
            request.options, request.facts, request.pipeline, mode=request.mode, watch=watch, agree=agree
        )
        made.note_regions(request.regions)
        return UsualCompiler(request, made)


def _agree(agreement: Agreement, lines: str, propose: Callable[[], Proposal]) -> Proposal:
    """One plan for all ranks, found when these lines are first compiled: later ones a rank compiles alone."""

    def ask() -> Proposal:
        said = agreement.exchange("how they keep the memory limit", to_json_text(propose()))
        return decide({rank: from_json_text(Proposal, text) for rank, text in said.items()})

    return agreement.remember(lines, ask)


@dataclass(frozen=True)
class UsualCompiler:
    """A `Compilation`, after which the ranks compare what they are about to run."""

    request: CompileRequest
    compilation: Compilation

    @property
    def awaits_copies(self) -> bool:
        """Whether the compiled graph waits for the gathered copies that it reads."""
        return self.compilation.awaits_copies

    @property
    def may_hold_copies(self) -> bool:
        """A recording would copy what lies elsewhere in each step."""
        return not self.compilation.records_cuda_graphs

    @property
    def outcome(self) -> CompileOutcome:
        """What came of `compile`."""
        return self.compilation.outcome

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Runs the passes over `gm` and generates code.

        Raises:
            RanksDisagreeError: Ranks are about to run different collectives.
        """
        compiled = self.compilation.compile(gm, inputs)
        if self.request.agreement is not None and self.request.is_new:
            self.request.agreement.confirm(
                "run different collectives", self.compilation.collectives, steps=self.compilation.orders
            )
        return compiled
