"""StreamForwardParameters, StreamBackwardParameters: parameters on disk are read before their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.core.capture_facts import CaptureFacts
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import come_from, emit, fake_value, find_calls, placeholders
from dsgraph.passes.ir.transfers import is_fetch, is_transfer

ops = torch.ops.dsgraph


@dataclass(frozen=True)
class StreamForwardParameters(GraphPass):
    """Read each parameter on disk during the computation before its use.

    before:  w = all_gather_into_tensor(rows_a, ...); y = mm(x, w); v = all_gather_into_tensor(rows_b, ...); ...
    after:   started_a = fetch_parameter(rows_a)
             a = take_parameter(started_a, rows_a); started_b = fetch_parameter(rows_b)
             w = all_gather_into_tensor(a, ...); y = mm(x, w)
             b = take_parameter(started_b, rows_b); v = all_gather_into_tensor(b, ...); ...

    A parameter is taken before the first node that reads it. Reads start in the order of use, each as early as
    `ahead_bytes` allows; the next one always during the use of the one before. A parameter is released after its last
    use. Left alone: parameters in memory, and values for the backward, which reads the file again.

    Attributes:
        ahead_bytes: Bytes that may be in transfer, or read and not used yet; or the next parameter.
    """

    ahead_bytes: int = 64 * 2**20

    phase: ClassVar[Phase] = Phase.FORWARD
    graph: ClassVar[str] = "step"

    def applies(self, facts: CaptureFacts) -> bool:
        """Return True if parameters of the graph are stored on disk."""
        return any(info.tier for info in facts.params.values())

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        stored = [node for node in placeholders(gm) if _is_on_disk(node, ctx) and _readers(node)]
        if not stored:
            return PassResult()
        stored.sort(key=lambda node: min(_readers(node)))
        started, taken = list[Node](), list[Node]()
        sizes = [number_of(rows, tensor_bytes(fake_value(rows))) for rows in stored]
        for number, rows in enumerate(stored):
            earlier = _first_together(sizes, number, room=self.ahead_bytes)
            behind = [*started[-1:], *taken[max(earlier - 1, 0) : earlier]]
            place = max(behind).next if behind else placeholders(gm)[-1].next
            readers = _readers(rows)
            first = min(readers)
            started.append(come_from(emit(min(place, first), ops.fetch_parameter.default, rows), rows))
            numbers = come_from(emit(first, ops.take_parameter.default, started[-1], rows), rows)
            for reader in readers:
                reader.replace_input_with(rows, numbers)
            taken.append(numbers)
        total = sum(sizes)
        return PassResult(changed=len(stored), done=(f"{len(stored)} parameters from disk, {total} bytes",))


@dataclass(frozen=True)
class StreamBackwardParameters(StreamForwardParameters):
    """Read each parameter on disk that the backward needs again, before its use.

    before:  n = store_gradient(g, rows_b)
             w = all_gather_into_tensor(rows_b, ...); dy = mm(dz, t(w)); ...
    after:   started_b = fetch_parameter(rows_b); n = store_gradient(g, rows_b, started_b)
             b = take_parameter(started_b, rows_b); w = all_gather_into_tensor(b, ...); dy = mm(dz, t(w)); ...

    Everything else is as in `StreamForwardParameters`. `store_gradient` uses a parameter's place in the file, not its
    values. An optimizer may update the parameter from then on: therefore it comes after the read, and depends on it.
    """

    phase: ClassVar[Phase] = Phase.BACKWARD

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        result = super().run(gm, ctx)
        for store in find_calls(gm, ops.store_gradient.default):
            grad, rows = store.all_input_nodes[:2]
            for read in [user for user in rows.users if is_fetch(user)]:
                if store < read:
                    read.append(store)
                store.args = (grad, rows, read)
        return result


def _is_on_disk(node: Node, ctx: PassContext) -> bool:
    info = ctx.params.get(node.name)
    return info is not None and info.tier == "disk"


def _readers(rows: Node) -> list[Node]:
    """Return the nodes that read a parameter's values."""
    return [user for user in rows.users if user.op != "output" and not is_transfer(user)]


def _first_together(sizes: Sequence[int], number: int, *, room: int) -> int:
    """Return the first of the reads before `number` that may be in memory as well; the one just before always may."""
    first = max(number - 1, 0)
    while first > 0 and sum(sizes[first - 1 : number + 1]) <= room:
        first -= 1
    return first
