"""Graphs around repeated blocks, such as a last norm: those with little to compute run uncompiled by default.

Compiling their kernels would take longer than all that it saves: they run once a step, and the blocks many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter
from torch.utils.flop_counter import FlopCounterMode

from dsgraph.partitioning.rows import split_dims
from dsgraph.passes.analysis.sizes import tensor_bytes

from .fake_run import on_fakes
from .frames import Capture
from .options import BackendOptions

MOST_BYTES = 16 * 2**20
"""Most bytes of inputs and outputs of a light graph. For more data, fused kernels save time and memory."""

LIGHT = 8
"""Operations per byte of inputs and outputs below which a graph is light: two matrices of 50 x 50 have more."""


def options_of_graph(
    options: BackendOptions, gm: GraphModule, inputs: Sequence[Any], capture: Capture, *, mode: str | None
) -> BackendOptions:
    """Return the options for one graph: codegen "eager" for a light one around blocks, unless the user chose Inductor.

    A graph that gathers parameters is compiled: what is light depends on a rank's batch, and ranks with other codegens
    might gather in another order.
    """
    is_chosen = "codegen" in options.model_fields_set or options.inductor or mode is not None
    if is_chosen or not capture.is_around_blocks:
        return options
    if any(isinstance(value, DTensor) and split_dims(value) for value in inputs):
        return options
    return options.model_copy(update={"codegen": "eager"}) if _is_light(gm, inputs) else options


def _is_light(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    counter = FlopCounterMode(display=False)
    try:
        with on_fakes(inputs) as fakes, torch.no_grad(), counter:
            outputs = Interpreter(gm).run(*fakes)
    except Exception:  # sizes that depend on data
        return False
    tensors = [value for value in (*fakes, *outputs) if isinstance(value, Tensor)]
    moved = sum(map(tensor_bytes, tensors))
    return moved <= MOST_BYTES and counter.get_total_flops() < LIGHT * moved
