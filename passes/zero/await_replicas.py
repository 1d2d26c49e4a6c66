"""AwaitReplicas: a gathered copy, which is on its way when a graph begins to run, is waited for where it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import emit, is_wait, placeholders


@dataclass(frozen=True)
class AwaitReplicas(GraphPass):
    """Wait for each replica ahead of its first use, instead of for all of them ahead of the graph.

    before:  y = mm(x, permute(replica, [1, 0]));                            return y, replica
    after:   w = wait_tensor(replica); y = mm(x, permute(w, [1, 0]));        return y, replica

    All replicas are on their way when the graph begins to run. Those that are needed later travel while it computes.
    The wait is for whatever transfer is under way to the replica's memory; where none is, it costs a call. What is
    saved for the backward stays the input itself: when the forward is through, it has arrived. Left alone: replicas
    that the graph neither reads nor hands on, and those that are waited for already.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    needs_mesh: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        replicas = [node for node in placeholders(gm) if node.name in ctx.replicas]
        waiting = [node for node in replicas if node.users and not any(map(is_wait, node.users))]
        for replica in waiting:
            _wait_at_first_use(replica)
        return PassResult(changed=len(waiting))


def _wait_at_first_use(replica: Node) -> None:
    # A view reads nothing, but what reads it would not depend on the wait.
    wait = emit(min(replica.users), c10d_functional.wait_tensor.default, replica)
    replica.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait and user.op != "output")
