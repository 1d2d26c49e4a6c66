"""The configuration's section `quantize_training` and its subsections."""

from __future__ import annotations

from typing import Literal

from .key import Needs, key
from .section import Section


class QuantizeBitsConfig(Section):
    """The number of bits of weights in training."""

    start_bits: int = key(16, "bits with which quantisation begins", ge=3, le=16)
    target_bits: int = key(16, "bits with which it ends", ge=3, le=16)


class QuantizeScheduleConfig(Section):
    """The schedule by which weights lose bits."""

    quantize_period: int = key(
        100, "quantised steps until the first bit is lost; the number doubles with every bit that is lost", ge=1
    )
    schedule_offset: int = key(100, "steps before weights are quantised at all", ge=0)


class QuantizeAlgoConfig(Section):
    """DeepSpeed's other section for `quantize_type` and `quantize_rounding`."""

    q_type: Literal["symmetric", "asymmetric"] | None = key(None, "as `quantize_type`")
    rounding: Literal["nearest", "stochastic"] | None = key(None, "as `quantize_rounding`")


class MixedQuantizeConfig(Section):
    """A gradual change of weights from one number of bits to the next."""

    enabled: bool = key(False, "whether they do")
    quantize_change_ratio: float = key(
        0.001, "how much less of the unrounded weight there is with every step", gt=0, le=1
    )


class EigenvalueConfig(Section):
    """A slower schedule for blocks to whose weights the loss is more sensitive."""

    enabled: bool = key(False, "whether they do")
    verbose: bool = key(False, "whether the first rank prints each block's eigenvalue")
    max_iter: int = key(100, "iterations for one eigenvalue, at most", ge=1)
    tol: float = key(1e-2, "relative change of an eigenvalue at which it is taken", gt=0)
    stability: float = key(1e-6, "added to norms that are divided by", ge=0)
    gas_boundary_resolution: int = key(
        1, "of so many steps one may compute eigenvalues; it does if bits are about to be lost", ge=1
    )
    layer_name: str | None = key(
        None, "the list of blocks, such as `model.layers`; without it all lists of equal blocks"
    )
    layer_num: int = key(0, "how many blocks it has; 0: any number", ge=0)


class QuantizeTrainingConfig(Section):
    """Quantization-aware training of linear layers (MoQ), see docs/guides/quantization-aware-training.md."""

    enabled: bool = key(
        False,
        "whether they do",
        needs=(Needs("zero_optimization.offload_param.device", ("none", "cpu"), "weights on disk cannot be rounded"),),
    )
    quantize_verbose: bool = key(False, "whether the first rank prints when a weight loses a bit")
    quantize_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "symmetric: 0 stays 0; asymmetric: least and largest weight stay"
    )
    quantize_rounding: Literal["nearest", "stochastic"] = key(
        "nearest", "stochastic: up as often as a number is near to the next one"
    )
    quantize_algo: QuantizeAlgoConfig = QuantizeAlgoConfig()
    quantize_groups: int | None = key(
        None, "parts of a weight's memory with a scale each; without it one a row, as INT8 has", ge=1
    )
    quantize_bits: QuantizeBitsConfig = QuantizeBitsConfig()
    quantize_schedule: QuantizeScheduleConfig = QuantizeScheduleConfig()
    fp16_mixed_quantize: MixedQuantizeConfig = MixedQuantizeConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
