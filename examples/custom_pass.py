"""Graph passes of one's own: one folds two casts in a row into one, and one moves a gather in the graph of a step.

    python -m examples.custom_pass
    torchrun --nproc-per-node 2 -m examples.custom_pass

The first command prints a graph before and after the first pass. The second one trains a model at ZeRO stage 3 with the
other pass. Both check that the results are the same.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import dsgraph
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.gathers import gathered_parameters, is_unit
from dsgraph.passes.ir.graph import find_calls, replace_and_erase

cast = torch.ops.aten._to_copy.default


@dsgraph.graph_pass(phase="joint")
def fold_casts(gm: GraphModule, ctx: dsgraph.PassContext) -> int:
    """Fold a widening cast that is cast back at once.

    before:  y = _to_copy(x: bf16, dtype=f32); z = _to_copy(y, dtype=bf16); w = sin(z)
    after:   w = sin(x)
    """
    changed = 0
    for second in find_calls(gm, cast):
        first = second.args[0]
        if first.target is not cast:
            continue
        if any(user.op == "output" for user in second.users) or not set(first.kwargs) == set(second.kwargs) == {
            "dtype"
        }:
            continue  # an output must stay a new tensor; a cast may also move to another device or memory format
        start, wide, end = (node.meta["val"].dtype for node in (first.args[0], first, second))
        if start == end and torch.promote_types(start, wide) == wide:  # the way there and back loses nothing
            replace_and_erase(second, first.args[0])
            changed += 1
    return changed


class Model(nn.Module):
    """Casts up and back down, as code assembled from several authors does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x.float().to(torch.bfloat16))


@dsgraph.graph_pass(phase="forward")
def show(gm: GraphModule, ctx: dsgraph.PassContext) -> int:
    """Print the graph that will run."""
    print(gm.print_readable(print_output=False))
    return 0


@dsgraph.graph_pass(phase="forward", graph="step", requires={"prefetched-forward-gathers"})
def gather_one_unit_earlier(gm: GraphModule, ctx: dsgraph.PassContext) -> int:
    """Start each gather of a step's forward before the unit that it follows; no gather overtakes another one.

    before:  run_1 = run_forward(1, ...); started = all_gather_into_tensor(shard); run_2 = run_forward(2, ...)
    after:   started = all_gather_into_tensor(shard); run_1 = run_forward(1, ...); run_2 = run_forward(2, ...)
    """
    changed = 0
    for started, preparations in gathered_parameters(gm, ctx.axes):
        node = started.prev
        while node.op == "call_function" and not is_unit(node) and not is_collective(node):
            node = node.prev
        if is_unit(node):
            for moved in (*preparations, started):
                node.prepend(moved)
            changed += 1
    return changed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def train(pipeline: dsgraph.Pipeline) -> tuple[nn.Module, list[Tensor]]:
    """Return a model after two backwards, and its gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = dsgraph.partition(nn.Sequential(*(Block() for _ in range(4))), stage=3, keep_whole_below=0)
    # Parameters this small would share one bucket.
    options = {"codegen": "eager", "pipeline": pipeline, "gather_bucket_bytes": 1}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    for _ in range(2):  # the first one records the calls of units, from which the graph of the step is made
        compiled(torch.ones(8, 64)).square().mean().backward()
    return model, [param.grad.to_local() for param in model.parameters()]


def move_gathers() -> None:
    """Train with and without the pass on each rank."""
    dist.init_process_group("gloo")
    _, expected = train(dsgraph.default_pipeline())
    model, found = train(dsgraph.default_pipeline() + gather_one_unit_earlier)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    (step,) = (item for item in dsgraph.report(model).compiles if item.kind == "step")
    (own,) = (item for item in step.passes if item.name == "gather_one_unit_earlier")
    if dist.get_rank() == 0:
        print(f"{own.name} moved {own.changed} gathers, and the gradients are the same")
    dist.destroy_process_group()


def fold() -> None:
    """Compile a model with and without the pass."""
    x = torch.randn(4, dtype=torch.bfloat16)
    for pipeline in (dsgraph.Pipeline([show]), dsgraph.Pipeline([fold_casts, show])):
        torch.compiler.reset()
        model = torch.compile(Model(), backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})
        print(f"passes: {[item.name for item in pipeline]}")
        assert torch.equal(model(x), Model()(x))


def main() -> None:
    if "RANK" in os.environ:
        move_gathers()
    else:
        fold()


if __name__ == "__main__":
    main()
