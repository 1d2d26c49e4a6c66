"""The configuration's `progressive_layer_drop`: in training, more and more blocks are skipped at random.

Zhang and He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping" (arXiv
2010.13369). At step t, block i = 1 ... L of a list is kept with probability p_i(t):

    theta(t) = (1 - theta) * exp(-gamma * t) + theta
    p_i(t) = 1 - i / L * (1 - theta(t))

A kept block returns x + (block(x) - x) / p_i, so that its contribution has the expected size; a skipped one returns x.
It is for blocks that add to their input (Pre-LN).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.checkpoint.step_counts import StepCounts
from dsgraph.engine.config.engine_config import EngineConfig, ProgressiveLayerDropConfig
from dsgraph.partitioning.blocks.repeated_blocks import is_block, repeated_blocks
from dsgraph.ranks.first_rank import print_notes
from dsgraph.utils.errors import ConfigError, EngineError
from dsgraph.utils.nearest import nearest

_OWN = ("progressive_layer_drop", "pld_theta")
"""Keyword arguments of models that drop layers themselves."""


class ProgressiveLayerDrop:
    """The blocks of a model that may be skipped, and the schedule.

    Attributes:
        blocks: Each block with its name; none if the model drops layers itself.
    """

    def __init__(self, config: ProgressiveLayerDropConfig, model: nn.Module) -> None:
        """Find the blocks.

        Args:
            config: The section of the file.
            model: Not yet partitioned.

        Raises:
            ConfigError: There are no equal blocks, or none of a given name; or one is checkpointed.
        """
        self._config = config
        self._theta = 1.0
        taken = inspect.signature(model.forward).parameters
        self.is_own = all(name in taken for name in _OWN)
        self.blocks = [] if self.is_own else _blocks(config, model)

    @classmethod
    def of(cls, settings: EngineConfig, model: nn.Module) -> ProgressiveLayerDrop | None:
        """Return the blocks, and print a line about them; None if the configuration drops none."""
        if not settings.progressive_layer_drop.enabled:
            return None
        found = cls(settings.progressive_layer_drop, model)
        print_notes(found.note(compiles=settings.dsgraph.compile, in_stages=settings.has_stages))
        return found

    def get_theta(self) -> float:
        """Return theta(t) at the last forward: the limit of the last block's probability of being kept."""
        return self._theta

    @property
    def left_out(self) -> tuple[str, ...]:
        """The paths of the blocks that the running micro-batch skips."""
        return tuple(block.path for block in self.blocks if block.is_left_out)

    def get_state(self) -> dict[str, Any]:
        """Return the keyword arguments of a model that drops layers itself."""
        return dict(zip(_OWN, (True, self._theta), strict=True))

    def in_stages(self) -> tuple[str, ...]:
        """Return the paths of the blocks of a model that is split into stages, and forget their modules.

        Raises:
            ConfigError: The model drops layers itself.
        """
        if self.is_own:
            raise ConfigError(
                "progressive_layer_drop: the model drops its layers itself, and pipeline stages capture its "
                "forward once, so that it would drop the same ones in each step: remove one of the two"
            )
        for block in self.blocks:
            block.module = nn.Module()
        return tuple(block.path for block in self.blocks)

    def keeps(self, counts: StepCounts) -> Callable[[int], Mapping[str, float]]:
        """Return a function that draws the blocks of a micro-batch of the next step, see `Keeps` of the stages."""
        steps, first = counts.steps, counts.micro

        def of(microbatch: int) -> Mapping[str, float]:
            self._draw(steps, first + microbatch)
            return {block.path: 0.0 if block.is_left_out else block.keep for block in self.blocks}

        return of

    def note(self, *, compiles: bool, in_stages: bool = False) -> str:
        """Return the line that is printed about layer dropping."""
        if self.is_own:
            how = "; it is compiled only if it has repeated blocks (dsgraph.blocks)" if compiles else ""
            return f"progressive_layer_drop: the model drops its layers itself{how}"
        lists = dict.fromkeys(repr(block.of) for block in self.blocks)
        count = f"{len(self.blocks)} blocks of {', '.join(lists)}"
        around = "" if in_stages else ", and the code that calls them in a loop runs uncompiled"
        how = f"; they are graphs of their own{around}" if compiles else ""
        return f"progressive_layer_drop: {count} can be dropped{how}"

    def take_over(self, model: nn.Module) -> bool:
        """Wrap the forward of each block.

        Returns:
            True to compile the model. One that drops layers itself changes from step to step around its blocks.
        """
        for block in self.blocks:
            block.take_over()
        return not self.is_own or any(map(is_block, model.modules()))

    def let_go(self) -> None:
        """Restore the forward of each block."""
        for block in self.blocks:
            block.let_go()

    def begin(self, counts: StepCounts) -> Mapping[str, Any]:
        """Draw the blocks that the next training micro-batch skips: equal on all ranks, and after a checkpoint.

        Returns:
            Keyword arguments for the model.
        """
        self._draw(counts.steps, counts.micro)
        return self.get_state() if self.is_own else {}

    def _draw(self, steps: int, micro: int) -> None:
        floor = self._config.theta
        self._theta = (1 - floor) * math.exp(-self._config.gamma * steps) + floor
        numbers = torch.rand(len(self.blocks), generator=torch.Generator().manual_seed(micro)).tolist()
        for block, number in zip(self.blocks, numbers, strict=True):
            block.keep = 1 - block.depth * (1 - self._theta)
            block.is_left_out = number >= block.keep


@dataclass(eq=False)
class _Block:
    """A block.

    Attributes:
        of: The name of its list.
        name: In the list.
        module: The block; an empty one if stages of a pipeline have it.
        depth: Its place in the list over the list's length, in (0, 1].
        keep: The probability with which it is kept.
        is_left_out: True if the running micro-batch skips it.
    """

    of: str
    name: str
    module: nn.Module
    depth: float
    keep: float = 1.0
    is_left_out: bool = False
    _run: Callable[..., Any] = field(init=False)
    _is_tuple: bool | None = None

    @property
    def path(self) -> str:
        """Its path in the model."""
        return f"{self.of}.{self.name}".lstrip(".")

    def take_over(self) -> None:
        self._run = _as_frame(type(self.module).forward, f"{self.of}.{self.name}")
        self.module.forward = self._forward

    def let_go(self) -> None:
        self.module.__dict__.pop("forward", None)

    @torch.compiler.disable(recursive=False)  # `_run` is captured
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        hidden = given[0] if given else None
        if not isinstance(hidden, Tensor):
            raise EngineError(
                f"progressive_layer_drop: {self.of}.{self.name} gets as its first argument, instead of hidden states, "
                f"a {type(hidden).__name__}: name other lists of blocks in progressive_layer_drop.blocks"
            )
        if getattr(self.module, "gradient_checkpointing", False):
            raise EngineError(
                f"progressive_layer_drop: {self.of}.{self.name} uses gradient checkpointing, whose second run may drop "
                "other blocks than the first: switch gradient checkpointing off"
            )
        trains = self.module.training and torch.is_grad_enabled()
        if trains and self.is_left_out:
            if self._is_tuple is None:  # a block that never ran has not shown what it gives
                with torch.no_grad(), torch.random.fork_rng():
                    self._check(torch.compiler.disable(self._run)(self.module, *args, **kwargs), hidden)
            return (hidden,) if self._is_tuple else hidden
        found = self._run(self.module, *args, **kwargs)
        if self._is_tuple is None:
            self._check(found, hidden)
        if not trains or self.keep == 1:
            return found
        scaled = torch.lerp(hidden, found[0] if self._is_tuple else found, 1 / self.keep)
        return (scaled,) if self._is_tuple else scaled

    @torch.compiler.disable
    def _check(self, found: Any, hidden: Tensor) -> None:
        """Check the output of the block, which must be hidden states of the same shape as its input."""
        parts = found if isinstance(found, tuple) else (found,)
        first, *rest = parts
        if rest or not isinstance(first, Tensor) or first.shape != hidden.shape or first.dtype != hidden.dtype:
            shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise EngineError(
                f"progressive_layer_drop: {self.of}.{self.name} returns {shapes} for hidden states of "
                f"{list(hidden.shape)}; a block that may be dropped must return one tensor of that shape: name "
                "other lists of blocks in progressive_layer_drop.blocks"
            )
        self._is_tuple = isinstance(found, tuple)


def _blocks(config: ProgressiveLayerDropConfig, model: nn.Module) -> list[_Block]:
    found = dict(repeated_blocks(model))
    names = config.blocks if config.blocks is not None else tuple(found)
    for name in names:
        if name not in found:
            raise ConfigError(
                f"progressive_layer_drop.blocks names {name!r}, which is no list of equal blocks"
                f"{nearest(name, list(found))}; there are {', '.join(found) or 'none'}"
            )
    if not names:
        raise ConfigError(
            "progressive_layer_drop: the model has no list of equal blocks, so none can be dropped: remove the section"
        )
    return [
        _Block(name, key, block, (at + 1) / len(found[name]))
        for name in names
        for at, (key, block) in enumerate(found[name].items())
    ]


def _as_frame(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a block's forward as a function that Dynamo captures, also where it skips the forward, which is torch's.

    It has a code object of its own, because Dynamo keeps compiled code by code object.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return FunctionType(run.__code__.replace(co_name=f"run {name}"), run.__globals__, name, None, run.__closure__)
