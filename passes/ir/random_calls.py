"""Calls that run a random op with a given state of the random number generator, so that a backward can repeat it.

Torch's partitioner inserts them in place of random ops that the backward recomputes, and leaves them without values:

    run_and_save_rng_state(op, *args)                        -> state, results      in the forward
    run_with_rng_state(state, op, *args)                     -> results             in the backward
    graphsafe_run_with_rng_state(op, *args, rng_state=...)   -> results             in both, on CUDA devices
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.passes.compat import HigherOrderOperator, OpOverload

from .graph import evaluate, fake_value

_SAVING, _RESTORING = "run_and_save_rng_state", "run_with_rng_state"
_NAMES = frozenset({_SAVING, _RESTORING, "graphsafe_run_with_rng_state"})


@dataclass(frozen=True)
class RandomCall:
    """A call that runs a random op.

    Attributes:
        op: The op that it runs.
        args: The op's positional arguments.
        kwargs: The op's arguments that are passed by name.
        state: The state that the op draws from; None if it is the generator's own, or is stored in a generator.
        returns_state: True if its first result is the state that the op drew from, and its second the op's.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Node | None
    returns_state: bool


def random_call(node: Node) -> RandomCall | None:
    """Return the random op that a node runs with a state; None for other nodes, random ops included."""
    target = node.target
    name = target.name() if isinstance(target, HigherOrderOperator) else ""
    if name not in _NAMES:
        return None
    first = 1 if name == _RESTORING else 0
    op, *args = node.args[first:]
    assert isinstance(op, OpOverload)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
    state = node.args[0] if name == _RESTORING else None
    return RandomCall(op, tuple(args), kwargs, state if isinstance(state, Node) else None, name == _SAVING)


def evaluate_random_calls(gm: GraphModule) -> None:
    """Add fake values to the calls of a graph that torch's partitioner inserted without."""
    for node in gm.graph.nodes:
        call = random_call(node) if "val" not in node.meta else None
        if call is None:
            continue
        if call.returns_state:
            items = {user.args[1]: fake_value(user) for user in node.users if user.target is operator.getitem}
            node.meta["val"] = (items[0], items[1])
        else:
            node.meta["val"] = evaluate(call.op, call.args, call.kwargs)
