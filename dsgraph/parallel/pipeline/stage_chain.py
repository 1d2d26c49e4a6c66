"""Stages whose repeated blocks are graphs of their own, and may be left out; and what techniques need of stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsgraph.compat.dynamo import is_set
from dsgraph.partitioning.blocks.repeated_blocks import find_blocks, read_blocks
from dsgraph.passes.parallel.stages.stage_graphs import StageGraph, StageGraphModule
from dsgraph.passes.parallel.stages.stage_segments import Segment, blocks_in, segments_of
from dsgraph.utils.errors import OptionError

from .schedule_order import ZERO_BUBBLE

Keeps = Callable[[int], Mapping[str, float]]
"""A function from the number of a micro-batch to the probability with which each block was kept; 0: it is left out."""


class StageChain:
    """The segments of a stage, called one after the other. Equal segments share one compiled graph.

    Attributes:
        keeps: The blocks that the running micro-batch keeps; None: all, unscaled.
    """

    def __init__(self, stage: StageGraph, blocks: Collection[str]) -> None:
        """Cut a stage at the blocks of these paths."""
        self.keeps: Mapping[str, float] | None = None
        graph = stage.module.graph
        self._inputs = [node.name for node in graph.find_nodes(op="placeholder")]
        self._results = [node.name for node in graph.output_node().args[0]]  # type: ignore[union-attr]
        self.segments = segments_of(stage, blocks)
        self._state = [[_tensor(stage.module, name) for name in segment.state] for segment in self.segments]
        self._runs: list[Callable[..., Any]] = [segment.module.__call__ for segment in self.segments]
        last = {name: at for at, segment in enumerate(self.segments) for name in (*segment.reads, *segment.gives)}
        self._done = [
            [name for name, at in last.items() if at == number and name not in self._results]
            for number in range(len(self.segments))
        ]

    def compile_graphs(self, options: Mapping[str, Any]) -> None:
        """Let the backend compile each segment when it first runs."""
        compiled: dict[str, Any] = {}
        for segment in self.segments:
            if segment.likeness not in compiled:
                compiled[segment.likeness] = torch.compile(
                    segment.module, backend="dsgraph", fullgraph=True, options=dict(options)
                )
        self._runs = [compiled[segment.likeness].__call__ for segment in self.segments]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return what the stage's graph returns for these arguments."""
        values = dict(zip(self._inputs, arguments, strict=True))
        for segment, run, state, done in zip(self.segments, self._runs, self._state, self._done, strict=True):
            keep = None if self.keeps is None else self.keeps.get(segment.block)
            if keep is None:
                given = run(*[values[name] for name in segment.reads], *state)
            else:
                given = [_kept(segment, keep, run, values, state)]
            values.update(zip(segment.gives, given, strict=True))
            for name in done:
                values.pop(name, None)
        return tuple(values[name] for name in self._results)


def _kept(
    segment: Segment, keep: float, run: Callable[..., Any], values: Mapping[str, Tensor], state: Sequence[Tensor]
) -> Tensor:
    """Return the hidden states after a block: unchanged if it is left out, else with a contribution that is scaled."""
    hidden = values[segment.hidden]
    if not keep:
        needs_gradient = segment.is_trained and torch.is_grad_enabled() and not hidden.requires_grad
        return hidden.detach().requires_grad_() if needs_gradient else hidden.view_as(hidden)
    (found,) = run(*[values[name] for name in segment.reads], *state)
    return torch.lerp(hidden, found, torch.tensor(1 / keep, dtype=hidden.dtype, device=hidden.device))


def check_droppable(stages: Sequence[StageGraph], blocks: Collection[str]) -> None:
    """Raise an error for a block that cannot be left out.

    Args:
        stages: All stages of the pipeline.
        blocks: The paths of the blocks.

    Raises:
        OptionError: Names the first one.
    """
    held = [blocks_in(stage, blocks) for stage in stages]
    segments = [segment for stage in stages for segment in segments_of(stage, blocks)]
    for block in blocks:
        number = sum(block in names for names in held)
        if number > 1:
            raise OptionError(
                f"pipeline: block {block!r} is in {number} stages, and cannot be left out as one: name the first "
                "module of each stage in split"
            )
        found = [segment for segment in segments if segment.block == block]
        if number and (len(found) != 1 or not found[0].hidden):
            raise OptionError(
                f"pipeline: block {block!r} cannot be left out: it must be one piece of the forward that reads hidden "
                "states, and returns only others of their shape and dtype. Name other lists of blocks"
            )


def _tensor(module: StageGraphModule, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), leaf)
    return found


@dataclass(frozen=True)
class Techniques:
    """Changes of the stages of a model that techniques of the engine need.

    Attributes:
        transforms: True if transforms change how parameters are gathered or reduced: they need shards, also over one
            data-parallel rank.
        offload: As for `partition`, for the shards.
        blocks: As for `partition`: compiled stages have one graph for all equal blocks.
        drops: Paths of blocks that a micro-batch may leave out.
    """

    transforms: bool = False
    offload: Mapping[str, Any] | None = None
    blocks: Literal["auto", "none"] | Sequence[str] = "none"
    drops: tuple[str, ...] = ()

    @property
    def needs_shards(self) -> bool:
        """True if parameters are partitioned also over one data-parallel rank."""
        return self.transforms or self.offload is not None

    def paths(self, model: nn.Module, schedule: str, options: Mapping[str, Any] | None) -> frozenset[str]:
        """Return the paths of the blocks that are graphs of their own.

        Args:
            model: The model.
            schedule: See `pipeline`.
            options: See `pipeline`.

        Raises:
            OptionError: The schedule or `memory_limit` needs one graph of a stage.
            PartitionError: `blocks` names no list of blocks.
        """
        chosen = options or {}
        modules = find_blocks(model, read_blocks(self.blocks)) if options is not None else frozenset()
        found = frozenset(name for name, module in model.named_modules() if module in modules) | {*self.drops}
        if found and schedule in ZERO_BUBBLE:
            raise OptionError(
                f"pipeline: blocks as graphs of their own are not supported with {schedule}, which defers the weight "
                "gradients of a stage's graph: use 1F1B, GPipe or Interleaved1F1B"
            )
        if found and is_set(chosen, "memory_limit"):
            raise OptionError(
                "pipeline: the option 'memory_limit' is planned for one graph of a stage, and blocks are to be graphs "
                "of their own (dsgraph.blocks, progressive_layer_drop): remove one of the two"
            )
        return found

    def check(self, stages: Sequence[StageGraph]) -> None:
        """Raise an error if a block of `drops` cannot be left out; see `check_droppable`."""
        check_droppable(stages, self.drops)


NO_TECHNIQUES = Techniques()
