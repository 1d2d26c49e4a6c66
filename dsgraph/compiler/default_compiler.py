"""The default compiler: the passes of a graph, then the code generator that the options name."""

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
    """The default choice: run the passes, then generate code."""

    def facts(self, facts: CaptureFacts, options: BackendOptions) -> CaptureFacts:
        """Return `facts` unchanged: the graph runs where it was captured."""
        return facts

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> UsualCompiler:
        """Return the compiler of the graph of `request`."""
        agree: Agree = alone
        facts = request.facts
        if facts.keeps_limit and request.agreement is not None and len(request.agreement.ranks) > 1:
            # Bound to nothing that holds the graph's inputs: what is compiled outlives them.
            lines = "\n".join(["plan", f"within {facts.memory_limit}", *request.lines])
            agree = partial(_agree, request.agreement, lines)
        if facts.stage is not None and facts.stage.group:
            agree = partial(_exchange, Agreement.of(facts.stage.group, facts.device_type))
        made = Compilation(
            request.options, request.facts, request.pipeline, mode=request.mode, watch=watch, agree=agree
        )
        return UsualCompiler(request, made)


def _agree(agreement: Agreement, lines: str, propose: Callable[[], Proposal]) -> Proposal:
    """Return one plan for all ranks. It is found when these lines are first compiled; later a rank compiles alone."""
    return agreement.remember(lines, lambda: _exchange(agreement, propose))


def _exchange(agreement: Agreement, propose: Callable[[], Proposal]) -> Proposal:
    """Return one plan for all ranks, which compile the graph at the same point."""
    said = agreement.exchange("how they keep the memory limit", to_json_text(propose()))
    return decide({rank: from_json_text(Proposal, text) for rank, text in said.items()})


@dataclass(frozen=True)
class UsualCompiler:
    """A `Compilation`, after which the ranks compare what they are about to run."""

    request: CompileRequest
    compilation: Compilation

    @property
    def awaits_copies(self) -> bool:
        """True if the compiled graph waits for the gathered copies that it reads."""
        return self.compilation.awaits_copies

    @property
    def outcome(self) -> CompileOutcome:
        """The outcome of `compile`."""
        return self.compilation.outcome

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run the passes over `gm` and generate code.

        Raises:
            RanksDisagreeError: Ranks are about to run different collectives.
        """
        compiled = self.compilation.compile(gm, inputs)
        if self.request.agreement is not None and self.request.is_new:
            self.request.agreement.confirm(
                "run different collectives", self.compilation.collectives, steps=self.compilation.orders
            )
        return compiled
