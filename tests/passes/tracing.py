"""Small graphs for pass tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_function, nop
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dsgraph  # noqa: F401  # registers the ops
from dsgraph.passes import AxisRole, CostModel, MeshAxis, PassContext, PassResult, Phase, Pipeline, Runner
from dsgraph.passes.analysis.budget import MemoryBudget, parameter_needs
from dsgraph.passes.compat import min_cut_rematerialization_partition
from dsgraph.passes.core.graph_pass import GraphPass
from dsgraph.passes.memory.scratch import without_duplicates

SHARD = MeshAxis("shard", 2, "0", "nccl")
GLOO = MeshAxis("shard", 2, "0", "gloo")
OUTER = MeshAxis("replicate", 2, "1", "nccl", AxisRole.REPLICATE)


@torch.library.custom_op("dsgraph_tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    """An op of somebody else's."""
    return x.clone()


@unknown.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def gather(shard: Tensor, shape: Sequence[int], gathered_copy: Tensor | None = None, **how: Any) -> Tensor:
    options = {"dtype": torch.float32, "reduce_dtype": torch.float32, "group": "0", "outer_groups": []}
    return torch.ops.dsgraph.gather_param(shard, gathered_copy, shape, **(options | how))


def reduce(grad: Tensor, shard_shape: Sequence[int], **how: Any) -> Tensor:
    options = {"dtype": torch.float32, "reduce_dtype": torch.float32, "group": "0", "outer_groups": []}
    return torch.ops.dsgraph.reduce_grad(grad, shard_shape, **(options | how))


def trace(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The ATen graph of `function`, with fake values on its nodes."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def joint(function: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    """The joint graph of `function`, without duplicate nodes."""
    found: list[GraphModule] = []

    def keep(gm: GraphModule, args: Sequence[object], **how: Any) -> tuple[GraphModule, GraphModule]:
        found.append(without_duplicates(gm))
        return min_cut_rematerialization_partition(gm, args, **how)

    aot_function(function, nop, partition_fn=keep)(*(value.detach().requires_grad_() for value in inputs))
    return found[0]


def run_pass(graph_pass: GraphPass, gm: GraphModule, *axes: MeshAxis, **facts: Any) -> PassResult:
    """Runs one pass under the runner, with whatever it requires taken as given; `facts` of the context besides."""
    axes = axes or (SHARD,)
    limits = {
        name: facts.pop(key) for key, name in (("memory_limit", "limit"), ("keep_bytes", "to_keep")) if key in facts
    }
    facts.setdefault("budget", MemoryBudget(**limits, needs=parameter_needs(facts.get("params", {}).values())))
    ctx = PassContext(**{"phase": graph_pass.phase, "axes": axes, "costs": CostModel.default(axes), **facts})
    runner = Runner(Pipeline([Providing(frozenset(graph_pass.requires)), graph_pass]))
    runner.run(gm, ctx)
    record = runner.records[-1]
    return PassResult(record.changed, record.notes)


class Providing(GraphPass):
    """Changes nothing and provides what a test needs."""

    phase = Phase.CAPTURE

    def __init__(self, facts: frozenset[str]) -> None:
        object.__setattr__(self, "provides", facts)

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        return PassResult()


def code(gm: GraphModule) -> str:
    """The graph's Python text, without types and blank lines."""
    lines = gm.graph.python_code("self").src.splitlines()
    return "\n".join(line.split(";")[0].rstrip() for line in lines if line.strip() and not line.startswith("import"))
