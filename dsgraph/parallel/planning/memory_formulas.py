"""Formulas of the bytes on one GPU. Each pipeline stage evaluates them with its own layers and parameters."""

from __future__ import annotations

from functools import partial

from sympy import Eq, Expr, Integer, Min, Piecewise, ceiling, floor

from .symbols import (
    BLOG,
    COUNTING,
    MEGATRON,
    RECOMPUTATION,
    ZERO_PAPER,
    Formula,
    batch,
    dp,
    heads,
    hidden,
    layers,
    micro_batch,
    params,
    pp,
    recomputes,
    seq,
    stage_layers,
    stage_params,
    tp,
    vocab,
    zero_stage,
)

_bytes = partial(Formula, unit="bytes")


def _split_from(stage: int) -> Expr:
    """Return the number of ranks over which ZeRO shards a state that is sharded from a stage on."""
    return Piecewise((dp, zero_stage >= stage), (Integer(1), True))


# Bytes of a parameter under mixed precision with Adam: 2 and 2 in half precision, and in float32 a copy of the
# parameter and Adam's two averages.
_HALF, _ADAM = 2, 4 + 4 + 4

MICRO_BATCHES = Formula(
    "micro_batches", batch / (dp * micro_batch), "", "micro-batches of a pipeline in a step", COUNTING
)
LAYER_PARAMS = Formula(
    "layer_params", (params - vocab * hidden) / layers, "", "parameters of a layer: all but the embeddings", COUNTING
)

IN_FLIGHT = Formula(
    "in_flight",
    Min(pp, MICRO_BATCHES.symbol),
    "",
    "micro-batches in flight on the first stage, under 1F1B",
    f"{MEGATRON}, section 2.2",
)
_LOGITS = 4 * seq * micro_batch * (hidden + vocab) / tp
LOGITS = _bytes(
    "logits",
    Piecewise((_LOGITS, Eq(pp, 1)), (Integer(0), True)),
    what="head and loss, if the first stage is also the last",
    source=f"{RECOMPUTATION}, section 4.3",
)


def _with_vocabulary(stage: str) -> Formula:
    own = stage_layers * LAYER_PARAMS.symbol + vocab * hidden
    return Formula("stage_params", own, "", f"parameters of {stage}", COUNTING)


# Bytes of a stage: as publications count them, and for the two stages that can need the most.
EVEN = (
    Formula("stage_layers", layers / pp, "", "layers of a stage, in an even split", COUNTING),
    Formula("stage_params", params / pp, "", "parameters of a stage, in an even split", COUNTING),
    IN_FLIGHT,
    LOGITS,
)
FIRST = (
    Formula("stage_layers", ceiling(layers / pp), "", "layers of the first stage, if it is the largest", COUNTING),
    _with_vocabulary("the first stage, which has the embeddings"),
    IN_FLIGHT,
    LOGITS,
)
LAST = (
    Formula("stage_layers", floor(layers / pp), "", "layers of the last stage, if it is the smallest", COUNTING),
    _with_vocabulary("the last stage, which has the head, as large as the embeddings"),
    Formula("in_flight", Integer(1), "", "micro-batches in flight on the last stage", f"{MEGATRON}, section 2.2"),
    _bytes("logits", _LOGITS, what="head and loss", source=f"{RECOMPUTATION}, section 4.3"),
)

PARAMETERS = _bytes(
    "parameters",
    _HALF * stage_params / (tp * _split_from(3)),
    what="parameters in half precision, split by ZeRO from stage 3 on",
    source=f"{ZERO_PAPER}, section 3.1 and figure 1",
)
GRADIENTS = _bytes(
    "gradients",
    _HALF * stage_params / (tp * _split_from(2)),
    what="gradients in half precision, split from stage 2 on",
    source=f"{ZERO_PAPER}, section 3.1 and figure 1",
)
OPTIMIZER = _bytes(
    "optimizer",
    _ADAM * stage_params / (tp * _split_from(1)),
    what="Adam's averages and the parameters in float32, split from stage 1 on",
    source=f"{ZERO_PAPER}, section 3.1 and figure 1",
)
STATES = _bytes(
    "model_states",
    PARAMETERS.symbol + GRADIENTS.symbol + OPTIMIZER.symbol,
    what="states that remain between two steps, and the gradients",
    source=COUNTING,
)

LAYER_INPUT = _bytes(
    "layer_input",
    2 * seq * micro_batch * hidden / tp,
    what="input of a layer in half precision, a slice per tensor-parallel rank",
    source=f"{ZERO_PAPER}, section 6.1",
)
LAYER_ACTIVATIONS = _bytes(
    "layer_activations",
    seq * micro_batch * hidden * (34 + 5 * heads * seq / hidden) / tp,
    what="all activations of a layer, a slice per tensor-parallel rank; includes attention scores (not fused)",
    source=f"{RECOMPUTATION}, equation 4",
)
ACTIVATIONS = _bytes(
    "activations",
    IN_FLIGHT.symbol
    * stage_layers
    * Piecewise((LAYER_INPUT.symbol, Eq(recomputes, 1)), (LAYER_ACTIVATIONS.symbol, True)),
    what="activations that the micro-batches in flight have saved",
    source=f"{BLOG}: the first stage holds about the activations of one micro-batch of the whole model",
)

WORKING = _bytes(
    "working_memory",
    recomputes * (LAYER_ACTIVATIONS.symbol + LAYER_INPUT.symbol * tp),
    what="one recomputed layer, and its gathered input",
    source=COUNTING,
)
LAYER_BUFFERS = _bytes(
    "layer_buffers",
    _HALF
    * LAYER_PARAMS.symbol
    / tp
    * Piecewise((Integer(3), Eq(zero_stage, 3)), (Integer(1), Eq(zero_stage, 2)), (Integer(0), True)),
    what="from stage 2 on a layer's gradient, in stage 3 also its parameters and the next layer's",
    source=COUNTING,
)
BUFFERS = _bytes(
    "buffers",
    WORKING.symbol + LOGITS.symbol + LAYER_BUFFERS.symbol,
    what="temporary memory within a micro-batch",
    source=COUNTING,
)
TOTAL = _bytes(
    "total",
    STATES.symbol + ACTIVATIONS.symbol + BUFFERS.symbol,
    what="all memory of a GPU",
    source=COUNTING,
)

OF_A_STEP = (MICRO_BATCHES, LAYER_PARAMS, LAYER_INPUT, LAYER_ACTIVATIONS, WORKING, LAYER_BUFFERS)
OF_A_STAGE = (PARAMETERS, GRADIENTS, OPTIMIZER, STATES, ACTIVATIONS, BUFFERS, TOTAL)
