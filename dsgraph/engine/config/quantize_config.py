"""The configuration's section `quantize_training` and its subsections."""

from __future__ import annotations

from typing import Literal

from .key import key
from .section import Section


class QuantizeBitsConfig(Section):
    """The number of bits of weights in training."""

    start_bits: int = key(16, "number of bits at the start", ge=3, le=16, stages=True)
    target_bits: int = key(16, "number of bits at the end", ge=3, le=16, stages=True)


class QuantizeScheduleConfig(Section):
    """The schedule that lowers the number of bits."""

    quantize_period: int = key(
        100,
        "quantized steps until the bits decrease by one; the period doubles after each decrease",
        ge=1,
        stages=True,
    )
    schedule_offset: int = key(100, "number of steps before quantization starts", ge=0, stages=True)


class QuantizeAlgoConfig(Section):
    """DeepSpeed's other section for `quantize_type` and `quantize_rounding`."""

    q_type: Literal["symmetric", "asymmetric"] | None = key(None, "as `quantize_type`", stages=True)
    rounding: Literal["nearest", "stochastic"] | None = key(None, "as `quantize_rounding`", stages=True)


class MixedQuantizeConfig(Section):
    """Mix quantized and unquantized weights, so that the number of bits changes gradually."""

    enabled: bool = key(False, "mix the weights", stages=True)
    quantize_change_ratio: float = key(
        0.001, "decrease per step of the unquantized weight's share", gt=0, le=1, stages=True
    )


class EigenvalueConfig(Section):
    """A slower schedule for blocks whose weights have larger Hessian eigenvalues (a more sensitive loss)."""

    enabled: bool = key(False, "compute eigenvalues, and adapt the schedule of each block")
    verbose: bool = key(False, "print the eigenvalue of each block on the first rank")
    max_iter: int = key(100, "maximum number of iterations per eigenvalue", ge=1)
    tol: float = key(1e-2, "relative change of an eigenvalue at which the iteration stops", gt=0)
    stability: float = key(1e-6, "added to norms before division by them", ge=0)
    gas_boundary_resolution: int = key(
        1, "compute eigenvalues at most every so many steps, when the bits are about to decrease", ge=1
    )
    layer_name: str | None = key(None, "list of blocks, such as `model.layers`; default: all lists of equal blocks")
    layer_num: int = key(0, "expected number of blocks; 0: any number", ge=0)


class QuantizeTrainingConfig(Section):
    """Quantization-aware training of linear layers (MoQ), see docs/guides/quantization-aware-training.md."""

    enabled: bool = key(
        False,
        "quantize weights during training",
        stages=True,
    )
    quantize_verbose: bool = key(False, "print each decrease of bits on the first rank", stages=True)
    quantize_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric",
        "symmetric: 0 is exact; asymmetric: the smallest and the largest weight are exact",
        stages=True,
    )
    quantize_rounding: Literal["nearest", "stochastic"] = key(
        "nearest",
        "stochastic: round up with a probability equal to the fractional part",
        stages=True,
    )
    quantize_algo: QuantizeAlgoConfig = QuantizeAlgoConfig()
    quantize_groups: int | None = key(
        None,
        "number of groups per weight, each with its own scale; default: one group per row, as in INT8",
        ge=1,
        stages=True,
    )
    quantize_bits: QuantizeBitsConfig = QuantizeBitsConfig()
    quantize_schedule: QuantizeScheduleConfig = QuantizeScheduleConfig()
    fp16_mixed_quantize: MixedQuantizeConfig = MixedQuantizeConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
