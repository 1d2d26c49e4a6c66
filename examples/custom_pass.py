"""A graph pass of one's own: fold two casts in a row into one.

    python -m examples.custom_pass

prints the graph before and after, and checks that the result is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dsgraph
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


def main() -> None:
    x = torch.randn(4, dtype=torch.bfloat16)
    for pipeline in (dsgraph.Pipeline([show]), dsgraph.Pipeline([fold_casts, show])):
        torch.compiler.reset()
        model = torch.compile(Model(), backend="dsgraph", options={"codegen": "eager", "pipeline": pipeline})
        print(f"passes: {[item.name for item in pipeline]}")
        assert torch.equal(model(x), Model()(x))


if __name__ == "__main__":
    main()
