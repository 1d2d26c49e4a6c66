"""A pass that gives each random value of a captured forward a seed of its own, as an input of the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext.kernels import seeded_random

SEEDS = "random_seeds"
"""The placeholder of the seeds of a micro-batch (1, number of random values), int64, on the CPU."""

# Function or method -> the one with a seed, and the named arguments that it takes.
_SEEDED: dict[Any, tuple[Callable[..., Any], frozenset[str]]] = {
    F.dropout: (seeded_random.dropout, frozenset({"p", "training", "inplace"})),
    torch.dropout: (seeded_random.dropout, frozenset({"p", "train"})),
    F.scaled_dot_product_attention: (
        seeded_random.scaled_dot_product_attention,
        frozenset({"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}),
    ),
    torch.rand_like: (seeded_random.rand_like, frozenset({"dtype"})),
    torch.randn_like: (seeded_random.randn_like, frozenset({"dtype"})),
    torch.rand: (seeded_random.rand, frozenset({"dtype", "device"})),
    torch.randn: (seeded_random.randn, frozenset({"dtype", "device"})),
    torch.bernoulli: (seeded_random.bernoulli, frozenset()),
    "bernoulli_": (seeded_random.bernoulli_, frozenset({"p"})),
    "uniform_": (seeded_random.uniform_, frozenset()),
    "normal_": (seeded_random.normal_, frozenset({"mean", "std"})),
}


def seed_draws(gm: GraphModule) -> list[Node]:
    """Let the functions of a captured forward that draw random numbers take seeds, in place. Return the seeds' nodes.

    before:  y = dropout(x, 0.1)
    after:   y = seeded dropout(x, 0.1, seed=select(random_seeds, 1, 0))

    A value is numbered by its place in the forward, so that its seed depends on neither stages nor schedules. Regions
    of `torch.utils.checkpoint` get the seeds of their values as operands.
    """
    made: list[Node] = []
    last = gm.graph.find_nodes(op="placeholder")[-1]

    def new() -> Node:
        if not made:
            with gm.graph.inserting_after(last):
                made.append(gm.graph.placeholder(SEEDS))
        with gm.graph.inserting_after(made[-1]):
            made.append(gm.graph.call_function(torch.select, (made[0], 1, len(made) - 1)))
        return made[-1]

    _seed(gm, new)
    gm.recompile()
    return made[1:]


def _seed(gm: GraphModule, new: Callable[[], Node]) -> None:
    """Give the random values of a graph seeds, which `new` makes in it."""
    for node in list(gm.graph.nodes):
        if node.op in ("call_function", "call_method") and node.target in _SEEDED and _draws(node):
            node.op, node.target = "call_function", _SEEDED[node.target][0]
            node.kwargs = {("training" if key == "train" else key): value for key, value in node.kwargs.items()}
            node.kwargs = {**node.kwargs, "seed": new()}
        elif str(node.target) == "tag_activation_checkpoint":
            body = getattr(gm, str(node.args[0].target))
            _seed(body, partial(_operand, node, body, new))
            body.recompile()


def _operand(call: Node, body: GraphModule, new: Callable[[], Node]) -> Node:
    """Return a new placeholder in the body of a call, which gets a new seed."""
    seed = new()
    call.args = (*call.args, seed)
    placeholders = body.graph.find_nodes(op="placeholder")
    with body.graph.inserting_after(placeholders[-1]):
        return body.graph.placeholder(seed.name)


def _draws(node: Node) -> bool:
    """Return True if a call draws random numbers, by arguments that its function with a seed takes."""
    if node.kwargs.keys() - _SEEDED[node.target][1] - {"input"}:
        return False
    if node.target is F.scaled_dot_product_attention:
        return _argument(node, 4, "dropout_p", 0.0) != 0.0
    if node.target in (F.dropout, torch.dropout):
        is_training = _argument(node, 2, "train" if node.target is torch.dropout else "training", True)
        return _argument(node, 1, "p", 0.5) != 0.0 and bool(is_training)
    return True


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
