"""The configuration's section `quantize_training`, and what stands in it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Section


class QuantizeBitsConfig(Section):
    """How many bits weights have in training."""

    start_bits: int = Field(default=16, ge=3, le=16, description="bits with which quantisation begins")
    target_bits: int = Field(default=16, ge=3, le=16, description="bits with which it ends")


class QuantizeScheduleConfig(Section):
    """When weights lose bits."""

    quantize_period: int = Field(
        default=100,
        ge=1,
        description="quantised steps until the first bit is lost; the number doubles with every bit that is lost",
    )
    schedule_offset: int = Field(default=100, ge=0, description="steps before weights are quantised at all")


class QuantizeAlgoConfig(Section):
    """DeepSpeed's other place for `quantize_type` and `quantize_rounding`."""

    q_type: Literal["symmetric", "asymmetric"] | None = Field(default=None, description="as `quantize_type`")
    rounding: Literal["nearest", "stochastic"] | None = Field(default=None, description="as `quantize_rounding`")


class MixedQuantizeConfig(Section):
    """Weights pass from one number of bits to the next bit by bit."""

    enabled: bool = Field(default=False, description="whether they do")
    quantize_change_ratio: float = Field(
        default=0.001, gt=0, le=1, description="how much less of the unrounded weight there is with every step"
    )


class EigenvalueConfig(Section):
    """Blocks to whose weights the loss is more sensitive keep their bits longer."""

    enabled: bool = Field(default=False, description="whether they do")
    verbose: bool = Field(default=False, description="whether the first rank prints each block's eigenvalue")
    max_iter: int = Field(default=100, ge=1, description="iterations for one eigenvalue, at most")
    tol: float = Field(default=1e-2, gt=0, description="relative change of an eigenvalue at which it is taken")
    stability: float = Field(default=1e-6, ge=0, description="added to norms that are divided by")
    gas_boundary_resolution: int = Field(
        default=1,
        ge=1,
        description="of so many steps one may compute eigenvalues; it does if bits are about to be lost",
    )
    layer_name: str | None = Field(
        default=None, description="the list of blocks, such as `model.layers`; without it all lists of equal blocks"
    )
    layer_num: int = Field(default=0, ge=0, description="how many blocks it has; 0: any number")


class QuantizeTrainingConfig(Section):
    """Weights of linear layers lose bits while the model is trained (MoQ): see docs/moq.md."""

    enabled: bool = Field(default=False, description="whether they do")
    quantize_verbose: bool = Field(default=False, description="whether the first rank prints when a weight loses a bit")
    quantize_type: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric", description="symmetric: 0 stays 0; asymmetric: least and largest weight stay"
    )
    quantize_rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="stochastic: up as often as a number is near to the next one"
    )
    quantize_algo: QuantizeAlgoConfig = QuantizeAlgoConfig()
    quantize_groups: int | None = Field(
        default=None,
        ge=1,
        description="parts of a weight's memory with a scale each; without it one a row, as INT8 has",
    )
    quantize_bits: QuantizeBitsConfig = QuantizeBitsConfig()
    quantize_schedule: QuantizeScheduleConfig = QuantizeScheduleConfig()
    fp16_mixed_quantize: MixedQuantizeConfig = MixedQuantizeConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
