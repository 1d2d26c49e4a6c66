"""Checks at run time whether a step holds more memory than was planned under a `memory_limit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsgraph.compiler.request import CompileRequest, GraphCompiler
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.passes.analysis.states import shard_bytes
from dsgraph.utils.errors import StrictError

Compiled = Callable[..., Any]


class _Forward:
    """A forward whose backward has not run; it lives as long as its autograd graph."""


def watch_limit(compiled: Compiled, request: CompileRequest, compiler: GraphCompiler) -> Compiled:
    """Return `compiled` with a check that warns if a step holds more memory than was planned for its graph.

    Raises:
        StrictError: At run time with `strict`, before the forward.
    """
    facts, limit = request.facts, request.facts.memory_limit
    if not facts.keeps_limit or limit is None or not request.trains or request.module is None:
        return compiled
    states = partition_states(request.module)
    if not states:
        return compiled  # of a pipeline stage, which `StageLimits` watches
    calls = 1 if facts.stage is None else max(1, len(states[0].step.blocks))
    peak, strict, function = compiler.outcome.step_peak, request.options.strict, request.function
    spare = 0 if peak is None else limit - peak
    trained = {number: shard_bytes(info) for number, info in facts.params.items() if info.requires_grad}
    blocks = [number for number, value in enumerate(request.inputs) if hasattr(value, "dsgraph_entry")]

    def gap(args: tuple[Any, ...]) -> str:
        waiting = sum(len(state.open_forwards) for state in states) // calls
        if waiting and (peak is None or waiting * peak > spare):
            return (
                f"{waiting + 1} forwards wait for their backward at once, but the plan counts one: run each backward "
                "before the next forward"
            )
        held = sum(size for number, size in trained.items() if args[number].grad is not None)
        if facts.stage is not None and any(args[number].dsgraph_entry.param.grad is not None for number in blocks):
            held = facts.stage.gradients
        if held - facts.held_gradients > (spare if facts.stage is None else states[0].step.limit.left):
            return (
                f"{held:,} bytes of gradients are held from an earlier backward: use zero_grad(set_to_none=True) after "
                "each step, dsgraph.accumulate around micro-batches, or a larger limit"
            )
        return ""

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        found = gap(args)
        if found:
            _tell(states, f"memory_limit cannot be promised for {function}: {found}", found, strict=strict)
        outputs = compiled(*args)
        _note_forward(outputs, states)
        return outputs

    return run


def _tell(states: list[PartitionState], message: str, gap: str, *, strict: bool) -> None:
    if strict:
        raise StrictError(message)
    for state in states:
        if gap not in state.limit_gaps:
            state.limit_gaps.append(gap)
            warnings.warn(message, stacklevel=3)


def _note_forward(outputs: Any, states: list[PartitionState]) -> None:
    forward = _Forward()

    def begin(_: Any) -> None:
        for state in states:
            state.open_forwards.discard(forward)

    nodes = {out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None}
    for node in nodes:
        node.register_prehook(begin)
    if nodes:
        for state in states:
            state.open_forwards.add(forward)
