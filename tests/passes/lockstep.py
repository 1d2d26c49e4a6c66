"""Runs the graphs of several ranks in this process, side by side, stopping all of them at each communication.

So what a pass must keep can be checked without process groups: markers have their meaning by definition, collectives by
what they do, and ranks that do not communicate alike are an error.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_arg

c10d = torch.ops._c10d_functional
markers = torch.ops.dsgraph

# Of several tensors at once -> of each of them.
_ONE_BY_ONE = {
    c10d.all_gather_into_tensor_coalesced.default: c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default: c10d.reduce_scatter_tensor.default,
    markers.gather_by_messages_coalesced.default: markers.gather_by_messages.default,
    markers.exchange_by_messages_coalesced.default: markers.exchange_by_messages.default,
}

# Of one rank, whoever runs it.
_ALONE = frozenset(
    {
        markers.compress_momentum.default,
        markers.compress_average.default,
        markers.unpack_signs.default,
        markers.fake_quantize.default,
    }
)

Groups = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Call:
    """A communication that a rank has come to."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def run(
    graphs: Sequence[GraphModule], inputs: Sequence[Sequence[Any]], groups: Groups | None = None
) -> list[list[Any]]:
    """Runs `graphs[rank]` on `inputs[rank]`; returns each rank's outputs.

    Args:
        graphs: One graph a rank.
        inputs: Each rank's inputs.
        groups: Group name -> the sets of ranks that have a group of this name. Default: one group "0" of all ranks.
    """
    world = len(graphs)
    groups = groups or {"0": [list(range(world))]}
    ranks = [_interpret(gm, given) for gm, given in zip(graphs, inputs, strict=True)]
    answers: list[Any] = [None] * world
    results: list[list[Any] | None] = [None] * world
    while any(result is None for result in results):
        calls: list[Call | None] = [None] * world
        for rank, interpreter in enumerate(ranks):
            try:
                calls[rank] = interpreter.send(answers[rank])
            except StopIteration as stop:
                results[rank] = stop.value
        present = [call for call in calls if call is not None]
        if present:
            assert len(present) == world, "some ranks are done while others communicate"
            assert len({call.target for call in present}) == 1, f"ranks differ: {[call.target for call in present]}"
            answers = _communicate(present, groups)
    return [result for result in results if result is not None]


def _interpret(gm: GraphModule, inputs: Sequence[Any]) -> Generator[Call, Any, list[Any]]:
    env: dict[Any, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "output":
            return list(map_arg(node.args[0], lambda n: env[n]))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: env[n])
            if node.target is c10d.wait_tensor.default:
                env[node] = args[0]
            elif node.target in _ALONE:
                env[node] = node.target(*args, **kwargs)
            elif getattr(node.target, "namespace", "") in ("_c10d_functional", "dsgraph"):
                env[node] = yield Call(node.target, args, kwargs)
            else:
                env[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without an output")


def _communicate(calls: list[Call], groups: Groups) -> list[Any]:
    target = calls[0].target
    if target is markers.gather_param.default:
        return [_gather_param(call, rank, calls, groups) for rank, call in enumerate(calls)]
    if target is markers.reduce_grad.default:
        return [_reduce_grad(call, rank, calls, groups) for rank, call in enumerate(calls)]
    if target in _ONE_BY_ONE:
        given = [[Call(_ONE_BY_ONE[target], (tensor, *call.args[1:]), {}) for tensor in call.args[0]] for call in calls]
        return list(map(list, zip(*(_communicate(list(one), groups) for one in zip(*given, strict=True)), strict=True)))
    group = calls[0].args[-1]
    answers = []
    for rank in range(len(calls)):
        peers = _peers(group, rank, groups)
        answers.append(_collective(target, [calls[peer] for peer in peers], peers.index(rank)))
    return answers


def _peers(group: str, rank: int, groups: Groups) -> list[int]:
    return next(members for members in groups[group] if rank in members)


def _collective(target: Any, calls: list[Call], position: int) -> Tensor:
    tensors = [call.args[0] for call in calls]
    assert len({tensor.dtype for tensor in tensors}) == 1
    if target in (c10d.all_gather_into_tensor.default, markers.gather_by_messages.default):
        assert len({tensor.shape for tensor in tensors}) == 1, "ranks gather pieces of different shapes"
        return torch.cat(tensors)
    if target is c10d.reduce_scatter_tensor.default:
        return _sum(tensors).chunk(len(tensors))[position]
    if target is c10d.all_reduce.default:
        return _sum(tensors)
    if target is c10d.all_to_all_single.default:
        return torch.cat([call.args[0].split(call.args[2])[position] for call in calls])
    if target is markers.exchange_by_messages.default:
        return torch.cat([tensor.chunk(len(tensors))[position] for tensor in tensors])
    raise NotImplementedError(target)


def _gather_param(call: Call, rank: int, calls: list[Call], groups: Groups) -> Tensor:
    shard, gathered_copy, _ = call.args
    if gathered_copy is not None:
        return gathered_copy
    dtype, group = call.kwargs["dtype"], call.kwargs["group"]
    if not group:
        return shard.to(dtype)
    return torch.cat([calls[peer].args[0].to(dtype) for peer in _peers(group, rank, groups)])


def _reduce_grad(call: Call, rank: int, calls: list[Call], groups: Groups) -> Tensor:
    how = call.kwargs
    sums = [other.args[0].to(how["reduce_dtype"]) for other in calls]
    ranks_in_all = 1
    for group in ([how["group"]] if how["group"] else []) + list(how["outer_groups"]):
        ranks_in_all *= len(_peers(group, rank, groups))
        sums = [_sum([sums[peer] for peer in _peers(group, other, groups)]) for other in range(len(calls))]
    total = sums[rank]
    if how["group"]:
        peers = _peers(how["group"], rank, groups)
        total = total.split([calls[peer].args[1][0] for peer in peers])[peers.index(rank)]
    return (total / ranks_in_all).to(how["dtype"])


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
