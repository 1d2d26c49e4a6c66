"""Formulas of the bytes that a GPU sends over each axis in a step, and of the time of a step."""

from __future__ import annotations

from functools import partial

from sympy import Eq, Integer, Max, Min, Piecewise, ceiling, floor

from .memory_formulas import LAYER_PARAMS, MICRO_BATCHES
from .symbols import (
    COUNTING,
    MEGATRON,
    ZERO_PAPER,
    Formula,
    batch,
    dp,
    dp_bytes_per_s,
    gpus,
    hidden,
    layers,
    micro_batch,
    peak,
    pp,
    pp_bytes_per_s,
    recomputes,
    seq,
    share_of_peak,
    tp,
    tp_bytes_per_s,
    vocab,
    zero_stage,
)

_bytes, _seconds, _flops = (partial(Formula, unit=unit) for unit in ("bytes", "seconds", "FLOPs"))
_m = MICRO_BATCHES.symbol

EFFICIENCY = Formula(
    "efficiency",
    _m / (_m + pp - 1),
    "",
    "share of a step's time in which a stage of the pipeline computes",
    f"{MEGATRON}, section 2.2.1: the bubble takes (pp - 1) / micro_batches of the time that computing takes",
)
BUBBLE = Formula("bubble", 1 - EFFICIENCY.symbol, "", "share of a step's time in which it waits", COUNTING)

LAYER_FORWARD = _flops(
    "layer_forward",
    24 * micro_batch * seq * hidden**2 * (1 + seq / (6 * hidden)) / tp,
    what="forward of a layer for one micro-batch, on one GPU",
    source=f"{MEGATRON}, appendix",
)
HEAD_FORWARD = _flops(
    "head_forward",
    2 * micro_batch * seq * hidden * vocab / tp,
    what="forward of the head, on the last stage",
    source=f"{MEGATRON}, appendix",
)
PASSES = Formula(
    "passes", 3 + recomputes, "", "forward, backward (twice the work) and the recomputed forward", MEGATRON
)
STAGE_FLOPS = _flops(
    "stage_flops",
    Max(
        ceiling(layers / pp) * PASSES.symbol * LAYER_FORWARD.symbol,
        floor(layers / pp) * PASSES.symbol * LAYER_FORWARD.symbol + 3 * HEAD_FORWARD.symbol,
    ),
    what="the slowest stage: the largest one, or the last one with the head",
    source=COUNTING,
)
MICRO_COMPUTE = _seconds(
    "micro_compute",
    STAGE_FLOPS.symbol / (peak * share_of_peak),
    what="computing of one micro-batch",
    source="share_of_peak is an assumption",
)

TP_BYTES = _bytes(
    "tp_bytes",
    _m * ceiling(layers / pp) * (4 + 2 * recomputes) * 2 * (tp - 1) / tp * 2 * micro_batch * seq * hidden,
    what="two all-reduces of a layer's result in each forward and in the backward",
    source=f"{MEGATRON}, sections 2.3 and 3.2",
)
PP_BYTES = _bytes(
    "pp_bytes",
    Min(1, pp - 1) * _m * 2 * 2 * micro_batch * seq * hidden / tp,
    what="each rank's slice of a layer's result to the next stage, its gradient to the one before",
    source=f"{MEGATRON}, section 4.1",
)
_LARGEST_STAGE = 2 * (ceiling(layers / pp) * LAYER_PARAMS.symbol + vocab * hidden) / tp
DP_BYTES = _bytes(
    "dp_bytes",
    (dp - 1)
    / dp
    * _LARGEST_STAGE
    * Piecewise((3 * _m, Eq(zero_stage, 3)), (1 + _m, Eq(zero_stage, 2)), (Integer(2), True)),
    what="a reduce-scatter and an all-gather a step; stage 2 reduces and stage 3 also gathers twice a micro-batch",
    source=f"{ZERO_PAPER}, section 7",
)

TP_TIME, PP_TIME, DP_TIME = (
    _seconds(
        f"{axis}_time",
        sent.symbol / rate,
        what=f"{words} parallelism communicates, without overlap",
        source=COUNTING,
    )
    for axis, words, sent, rate in (
        ("tp", "tensor", TP_BYTES, tp_bytes_per_s),
        ("pp", "pipeline", PP_BYTES, pp_bytes_per_s),
        ("dp", "data", DP_BYTES, dp_bytes_per_s),
    )
)
BUSY = _seconds(
    "busy",
    _m * MICRO_COMPUTE.symbol + TP_TIME.symbol + PP_TIME.symbol,
    what="all micro-batches of the slowest stage",
    source=COUNTING,
)
WAITING = _seconds(
    "waiting",
    BUSY.symbol * (pp - 1) / _m,
    what="the pipeline fills and drains",
    source=f"{MEGATRON}, section 2.2.1",
)
STEP = _seconds("step", BUSY.symbol + WAITING.symbol + DP_TIME.symbol, what="a step", source=COUNTING)

_TOKENS_WORK = batch * seq * hidden
MODEL_FLOPS = _flops(
    "model_flops",
    3 * _TOKENS_WORK * (24 * layers * hidden * (1 + seq / (6 * hidden)) + 2 * vocab),
    what="operations of the model, without recomputation",
    source=f"{MEGATRON}, equation 3, without its recomputation",
)
HARDWARE_FLOPS = _flops(
    "hardware_flops",
    MODEL_FLOPS.symbol + recomputes * _TOKENS_WORK * 24 * layers * hidden * (1 + seq / (6 * hidden)),
    what="operations that the GPUs execute",
    source=f"{MEGATRON}, equation 3",
)
MODEL_RATE = Formula(
    "model_rate",
    MODEL_FLOPS.symbol / (STEP.symbol * gpus),
    "FLOPs/s",
    "rate of a GPU, without recomputation",
    COUNTING,
)
HARDWARE_RATE = Formula(
    "hardware_rate",
    HARDWARE_FLOPS.symbol / (STEP.symbol * gpus),
    "FLOPs/s",
    "rate of a GPU, with recomputation",
    MEGATRON,
)

TIMES = (
    *(EFFICIENCY, BUBBLE, LAYER_FORWARD, HEAD_FORWARD, PASSES, STAGE_FLOPS, MICRO_COMPUTE),
    *(TP_BYTES, PP_BYTES, DP_BYTES, TP_TIME, PP_TIME, DP_TIME, BUSY, WAITING, STEP),
    *(MODEL_FLOPS, HARDWARE_FLOPS, MODEL_RATE, HARDWARE_RATE),
)
