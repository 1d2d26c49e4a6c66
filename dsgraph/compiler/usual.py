"""How a graph is compiled unless a tool was chosen: its passes, and the code generator that the options name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from dsgraph.json_records import from_json_text, to_json_text
from dsgraph.passes import CaptureFacts
from dsgraph.passes.memory.fit import Proposal, alone, decide

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
        agree = partial(_agree, request) if _has_others(request) else alone
        made = Compilation(request.options, request.facts, mode=request.mode, watch=watch, agree=agree)
        return UsualCompiler(request, made)


def _has_others(request: CompileRequest) -> bool:
    return request.agreement is not None and len(request.agreement.ranks) > 1


def _agree(request: CompileRequest, propose: Callable[[], Proposal]) -> Proposal:
    """One plan for all ranks, found when these lines are first compiled: later ones a rank compiles alone."""
    agreement = request.agreement
    assert agreement is not None

    def ask() -> Proposal:
        said = agreement.exchange("how they keep the memory limit", to_json_text(propose()))
        return decide({rank: from_json_text(Proposal, text) for rank, text in said.items()})

    return agreement.remember("\n".join(["plan", f"within {request.facts.memory_limit}", *request.lines]), ask)


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
