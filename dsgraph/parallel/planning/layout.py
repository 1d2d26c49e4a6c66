"""The numbers of a model and of a layout of tensor, pipeline and data parallelism, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from decimal import Decimal

from dsgraph.utils.errors import LayoutError

from .gpus import NodeGpu

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_USUAL_HEADS = (128, 64)  # widths of a head, in the order in which they are tried


def read_count(text: str) -> int:
    """Return the number in a text such as `1T`, `175B`, `1.5b`, `350M` or `1_000_000`; B is 10**9.

    Raises:
        LayoutError: It is no number, or not above 0.
    """
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:E\d+)?)([KMBT]?)", text.strip().upper())
    value = Decimal(found[1]) * _SUFFIXES[found[2]] if found else Decimal(0)
    if value < 1 or value != int(value):
        raise LayoutError(f"is {text!r}; it takes a whole number above 0, such as 1T, 175B, 1.5B or 350M")
    return int(value)


@dataclass(frozen=True)
class ModelShape:
    """A transformer with equal layers.

    Attributes:
        params: Parameters, embeddings among them.
        layers: Transformer layers.
        hidden: Width of a layer.
        seq: Tokens of a sequence.
        vocab: Tokens of the vocabulary. The matrix of embeddings is also the head's.
        heads: Attention heads.

    Raises:
        LayoutError: The numbers do not go together.
    """

    params: int
    layers: int
    hidden: int
    seq: int
    vocab: int
    heads: int

    def __post_init__(self) -> None:
        _check_above_zero(self)
        if self.hidden % self.heads:
            raise LayoutError(f"heads: {self.heads} do not divide hidden {self.hidden}; take a number that does")
        usual = 12 * self.layers * self.hidden**2 + self.vocab * self.hidden
        if not 0.5 <= self.params / usual <= 2:
            raise LayoutError(
                f"params is {self.params:.4g}, and {self.layers} layers of {self.hidden} with a vocabulary of "
                f"{self.vocab} have about {usual:.4g}; give numbers of one model"
            )


def usual_heads(hidden: int) -> int:
    """Return the number of heads of width 128, or of 64 if 128 does not divide `hidden`.

    Raises:
        LayoutError: Neither divides it.
    """
    for width in _USUAL_HEADS:
        if hidden >= width and hidden % width == 0:
            return hidden // width
    raise LayoutError(f"hidden is {hidden}, which heads of 128 or of 64 do not divide; give --heads")


@dataclass(frozen=True)
class TrainingSetup:
    """The training settings that all compared layouts share.

    Attributes:
        batch: Sequences of a step, over all GPUs.
        micro_batch: Sequences that a pipeline takes at once.
        zero_stage: 0 to 3, over the data-parallel ranks.
        checkpointing: True if a layer keeps only its input, and recomputes the rest for the backward.

    Raises:
        LayoutError: A number is out of range.
    """

    batch: int
    micro_batch: int = 1
    zero_stage: int = 0
    checkpointing: bool = True

    def __post_init__(self) -> None:
        if self.batch < 1 or self.micro_batch < 1:
            raise LayoutError(f"batch {self.batch}, micro_batch {self.micro_batch}: each takes a whole number above 0")
        if self.zero_stage not in range(4):
            raise LayoutError(f"zero_stage is {self.zero_stage}; it takes 0, 1, 2 or 3")


@dataclass(frozen=True)
class RankLayout:
    """The division of ranks: `tp` next to each other, `pp` farthest apart.

    Attributes:
        tp: Ranks that share every layer (tensor parallelism).
        pp: Stages of the pipeline.
        dp: Pipelines, each with its part of the batch.

    Raises:
        LayoutError: A number is below 1.
    """

    tp: int
    pp: int
    dp: int

    def __post_init__(self) -> None:
        _check_above_zero(self)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tp * self.pp * self.dp


def refusal(layout: RankLayout, model: ModelShape, training: TrainingSetup, *, gpu: NodeGpu, gpus: int) -> str | None:
    """Return why a layout is impossible, apart from memory; None if it is possible."""
    if layout.gpus != gpus:
        return f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} is {layout.gpus} GPUs, and gpus is {gpus}"
    if layout.tp > gpu.per_node:
        return f"tp {layout.tp} is more than the {gpu.per_node} GPUs of a node ({gpu.node}); take at most so many"
    if gpus > gpu.per_node and gpu.per_node % layout.tp:
        return f"tp {layout.tp} does not divide the {gpu.per_node} GPUs of a node ({gpu.node}); take a divisor"
    if model.heads % layout.tp:
        return f"tp {layout.tp} does not divide {model.heads} heads; take a divisor"
    if layout.pp > model.layers:
        return f"pp {layout.pp} is more than {model.layers} layers; take at most so many stages"
    at_once = layout.dp * training.micro_batch
    if training.batch % at_once:
        return (
            f"batch {training.batch} is no multiple of {at_once}, which are dp {layout.dp} x micro_batch "
            f"{training.micro_batch}; take one"
        )
    return None


def _check_above_zero(numbers: ModelShape | RankLayout) -> None:
    for field in fields(numbers):
        value = getattr(numbers, field.name)
        if value < 1:
            raise LayoutError(f"{field.name} is {value}; it takes a whole number above 0")
