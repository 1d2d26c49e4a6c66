"""AwaitCopies: gathered copies that may still be gathering are waited for before their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import emit, is_wait, placeholders


@dataclass(frozen=True)
class AwaitCopies(GraphPass):
    """Wait for each gathered copy before its first use, instead of for all of them before the graph.

    before:  y = mm(x, permute(gathered_copy, [1, 0]));                            return y, gathered_copy
    after:   w = wait_tensor(gathered_copy); y = mm(x, permute(w, [1, 0]));        return y, gathered_copy

    All gathered copies may still be gathering when the graph begins. Those that are needed later arrive while it
    computes. The wait is for the running transfer to the copy's memory; without one, it costs only a call. For the
    backward the input itself is saved: at the end of the forward it has arrived. Left alone: copies that the graph
    neither reads nor passes on, and those that are waited for already.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    graph: ClassVar[str] = "step"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        gathered_copies = [node for node in placeholders(gm) if node.name in ctx.gathered_copies]
        waiting = [node for node in gathered_copies if node.users and not any(map(is_wait, node.users))]
        for gathered_copy in waiting:
            _wait_at_first_use(gathered_copy)
        return PassResult(changed=len(waiting))


def _wait_at_first_use(gathered_copy: Node) -> None:
    # A view reads nothing, but its readers would not depend on the wait.
    wait = emit(min(gathered_copy.users), c10d_functional.wait_tensor.default, gathered_copy)
    gathered_copy.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait and user.op != "output")
