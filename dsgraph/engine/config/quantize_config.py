"""The configuration's section `quantize_training` and its subsections."""

from __future__ import annotations

from typing import Literal

from .key import Needs, key
from .section import Section


class QuantizeBitsConfig(Section):
    """The number of bits of weights in training."""

    start_bits: int = key(16, "number of bits at the start", ge=3, le=16)
    target_bits: int = key(16, "number of bits at the end", ge=3, le=16)


class QuantizeScheduleConfig(Section):
    """The schedule by which weights lose bits."""

    quantize_period: int = key(100, "quantised steps until weights lose the first bit; it doubles with each bit", ge=1)
    schedule_offset: int = key(100, "steps before quantisation starts", ge=0)


class QuantizeAlgoConfig(Section):
    """DeepSpeed's other section for `quantize_type` and `quantize_rounding`."""

    q_type: Literal["symmetric", "asymmetric"] | None = key(None, "as `quantize_type`")
    rounding: Literal["nearest", "stochastic"] | None = key(None, "as `quantize_rounding`")


class MixedQuantizeConfig(Section):
    """A gradual change of weights from one number of bits to the next."""

    enabled: bool = key(False, "mix quantised and unrounded weights")
    quantize_change_ratio: float = key(0.001, "decrease of the unrounded weight's share in each step", gt=0, le=1)


class EigenvalueConfig(Section):
    """A slower schedule for blocks to whose weights the loss is more sensitive."""

    enabled: bool = key(False, "use eigenvalues")
    verbose: bool = key(False, "print each block's eigenvalue on the first rank")
    max_iter: int = key(100, "iterations for one eigenvalue, at most", ge=1)
    tol: float = key(1e-2, "relative change of an eigenvalue below which iteration stops", gt=0)
    stability: float = key(1e-6, "added to norms before dividing by them", ge=0)
    gas_boundary_resolution: int = key(
        1, "one of so many steps may compute eigenvalues; it does if weights are about to lose a bit", ge=1
    )
    layer_name: str | None = key(None, "the list of blocks, such as `model.layers`; default: all lists of equal blocks")
    layer_num: int = key(0, "number of blocks in it; 0: any number", ge=0)


class QuantizeTrainingConfig(Section):
    """Quantization-aware training of linear layers (MoQ), see docs/guides/quantization-aware-training.md."""

    enabled: bool = key(
        False,
        "quantise weights in training",
        needs=(Needs("zero_optimization.offload_param.device", ("none", "cpu"), "weights on disk cannot be rounded"),),
    )
    quantize_verbose: bool = key(False, "print on the first rank when a weight loses a bit")
    quantize_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "symmetric: 0 stays 0; asymmetric: the least and the largest weight are kept"
    )
    quantize_rounding: Literal["nearest", "stochastic"] = key(
        "nearest", "stochastic: round up at random, with the fraction as probability"
    )
    quantize_algo: QuantizeAlgoConfig = QuantizeAlgoConfig()
    quantize_groups: int | None = key(
        None, "parts of a weight with a scale each; default: one a row, as for INT8", ge=1
    )
    quantize_bits: QuantizeBitsConfig = QuantizeBitsConfig()
    quantize_schedule: QuantizeScheduleConfig = QuantizeScheduleConfig()
    fp16_mixed_quantize: MixedQuantizeConfig = MixedQuantizeConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
