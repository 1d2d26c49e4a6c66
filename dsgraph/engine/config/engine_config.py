"""The configuration of the engine: sections, names and defaults of DeepSpeed's JSON file, and one section of our own.

`docs/reference/config.md` is written from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

from .dsgraph_config import DsgraphConfig
from .key import NO_EFFECT, FromArguments, Needs, key
from .quantize_config import QuantizeTrainingConfig
from .section import PathText, Section
from .sparse_config import SparseAttentionConfig, layout_of_section
from .zero_config import ZeroConfig

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PRINTED = Needs("steps_per_print", (), "it is printed with the lines of steps", note="is not printed")


def _compute_dtype(_: Any, config: EngineConfig) -> torch.dtype | None:
    return config.compute_dtype


class OptimizerConfig(Section):
    """The optimizer, unless the caller passes one."""

    type: str = key(
        ...,
        "`AdamW`, `Adam`, `Lamb`, `Muon` (AdamW for all but the model's inner matrices), `OneBitAdam` "
        "or `OneBitLamb` (docs/guides/slow-networks.md), or the name of a class of `torch.optim`. `Adam` decouples the "
        "weight decay as `AdamW` does unless its parameter `adam_w_mode` is false, as in DeepSpeed",
        stages=True,
    )
    params: dict[str, Any] = key(
        {},
        stages=True,
        auto={
            "lr": "learning_rate",
            "betas": FromArguments("adam_beta1, adam_beta2", lambda args, _: [args.adam_beta1, args.adam_beta2]),
            "eps": "adam_epsilon",
            "weight_decay": "weight_decay",
        },
        text="arguments of its constructor. `OneBitAdam` takes `lr`, `freeze_step`, `betas`, `eps` and "
        "`weight_decay`; `OneBitLamb` takes `max_coeff`, `min_coeff`, `coeff_beta`, `factor_max`, `factor_min` and "
        "`factor_threshold` as well; DeepSpeed's `cuda_aware` and `comm_backend_name` have no effect on them",
    )


class SchedulerConfig(Section):
    """The learning rate schedule, unless the caller passes one."""

    type: str = key(..., "`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `LRRangeTest` or `OneCycle`", stages=True)
    params: dict[str, Any] = key(
        {},
        "arguments of its constructor",
        stages=True,
        auto={
            "warmup_max_lr": "learning_rate",
            "total_num_steps": FromArguments("the number of steps", lambda _, steps: steps),
            "warmup_num_steps": FromArguments("warmup_steps", lambda args, steps: max(1, args.get_warmup_steps(steps))),
        },
    )


class Fp16Config(Section):
    """Training in float16, with the loss scaled so that small gradients survive."""

    enabled: bool = key(
        False,
        "compute the forward with float16 parameters; shards stay in float32",
        argument="param_dtype",
        value=_compute_dtype,
        stages=True,
        auto=FromArguments("fp16", lambda args, _: bool(args.fp16 or args.fp16_full_eval)),
        needs=(Needs("bf16.enabled", (False,), "the forward has one dtype"),),
    )
    loss_scale: float = key(0, "fixed loss scale; 0: dynamic loss scale", ge=0, stages=True)
    initial_scale_power: int = key(16, "the dynamic scale starts at 2 to this power", ge=0, stages=True)
    loss_scale_window: int = key(1000, "number of steps without overflow until the scale doubles", ge=1, stages=True)
    hysteresis: int = key(2, "number of overflows until the scale halves", ge=1, stages=True)
    consecutive_hysteresis: bool = key(False, "reset the count of overflows after a step without overflow", stages=True)
    min_loss_scale: float = key(1, "smallest scale; an overflow at this scale is an error", gt=0, stages=True)


class Bf16Config(Section):
    """Training in bfloat16, which needs no loss scale."""

    enabled: bool = key(
        False,
        "compute the forward with bfloat16 parameters; shards stay in float32",
        argument="param_dtype",
        value=_compute_dtype,
        stages=True,
        auto=FromArguments("bf16", lambda args, _: bool(args.bf16 or args.bf16_full_eval)),
    )
    check_grad_overflow: bool = key(True, "skip a step if gradients are not finite", stages=True)


class FlopsProfilerConfig(Section):
    """A profile of the operations of each module, printed once: see docs/reference/engine.md."""

    enabled: bool = key(False, "write the profile")
    profile_step: int = key(1, "number of the step after which the profile is written", ge=1)
    module_depth: int = key(-1, "largest module depth in the table; -1: all depths", ge=-1)
    top_modules: int = key(1, "number of modules per depth in the table", ge=1)
    detailed: bool = key(True, "also show the tree of all modules")
    output_file: PathText | None = key(None, "file of the profile; by default it is printed")


class _ScalarFilesConfig(Section):
    enabled: bool = key(False, "write the scalars", stages=True)
    output_path: PathText = key("", "parent of the job's folder; default: the working directory", stages=True)
    job_name: str = key("DeepSpeedJobName", "name of the job's folder", stages=True)


class TensorboardConfig(_ScalarFilesConfig):
    """Scalars of each step for TensorBoard; `pip install dsgraph[tensorboard]` installs it."""


class CsvMonitorConfig(_ScalarFilesConfig):
    """Scalars of each step as CSV files, one file per scalar."""


class DataTypesConfig(Section):
    """Dtypes besides those of the forward."""

    grad_accum_dtype: Literal["fp32"] | None = key(
        None, "gradients of micro-batches are always accumulated in the dtype of the shards"
    )


class ActivationCheckpointingConfig(Section):
    """Storage of activations between the forward and the backward."""

    cpu_checkpointing: bool = key(
        False,
        "move saved activations to host memory after their last use in the forward, and back before the backward "
        "needs them; with `torch.utils.checkpoint` or `dsgraph.checkpointing.checkpoint` these are the inputs of the "
        "marked regions",
        option="activation_offload",
        value=lambda *_: "host",
        stages=True,
    )


_STAGES = Needs("parallel.pp", (), "it is about pipeline stages", note=NO_EFFECT, other_than=1)


_TENSOR_PARALLEL = Needs("parallel.tp", (), "tensor-parallel ranks share the tokens", note=NO_EFFECT, other_than=1)


class ParallelConfig(Section):
    """The ranks that share one model (tensor and pipeline parallel), besides the data-parallel ranks.

    See docs/guides/parallelism.md.
    """

    dp: int = key(1, "number of data-parallel ranks; ZeRO shards over them", ge=1, stages=True)
    tp: int = key(1, "number of tensor-parallel ranks (neighbours)", ge=1, stages=True)
    pp: int = key(1, "number of pipeline ranks", ge=1, stages=True)
    sequence_parallel: bool = key(
        False,
        "let each tensor-parallel rank compute norms, dropout and residuals on its share of the tokens: less memory "
        "for activations",
        option="sequence_parallel",
        needs=(_TENSOR_PARALLEL,),
        stages=True,
    )
    schedule: str = key("1F1B", "pipeline schedule, see `dsgraph schedule`", needs=(_STAGES,), stages=True)
    split: Literal["auto"] | tuple[str, ...] = key(
        "auto", "the first module of the second and each later stage", needs=(_STAGES,), stages=True
    )


class ProgressiveLayerDropConfig(Section):
    """Blocks of the model are skipped at random in training: see docs/guides/layer-dropping.md."""

    enabled: bool = key(False, "drop blocks", stages=True)
    theta: float = key(0.5, "final probability that the last block is kept", gt=0, le=1, stages=True)
    gamma: float = key(0.001, "decay rate: the distance to `theta` shrinks by exp(-gamma) per step", ge=0, stages=True)
    blocks: tuple[str, ...] | None = key(
        None, "names of the lists of blocks; default: all lists of equal blocks", stages=True
    )


class CheckpointConfig(Section):
    """How checkpoints are saved."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"], BeforeValidator(lambda v: v.capitalize() if isinstance(v, str) else v)
    ] = key(
        "Warn",
        "what to do if ranks pass different tags: `Fail` raises an error, `Warn` prints a warning and uses the tag of "
        "the first rank, `Ignore` uses it silently",
        stages=True,
    )


class CompileConfig(Section):
    """DeepSpeed's section for DeepCompile. It may have `deepcompile` and `offload_*`, which are listed below."""


class EngineConfig(Section):
    """The whole file."""

    train_batch_size: int | None = key(
        None,
        "samples per step, over all ranks",
        ge=1,
        stages=True,
        auto=FromArguments(
            "the batch of all ranks",
            lambda args, _: args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        ),
    )
    train_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch of one rank", ge=1, stages=True, auto="per_device_train_batch_size"
    )
    gradient_accumulation_steps: int | None = key(
        None, "micro-batches per step", ge=1, stages=True, auto="gradient_accumulation_steps"
    )
    steps_per_print: int | None = key(None, "print a line every so many steps; default: never", ge=1, stages=True)
    gradient_clipping: float = key(
        1.0, "clip gradients to this global norm; 0 disables clipping", ge=0, auto="max_grad_norm", stages=True
    )
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = key(
        None,
        "dtype in which gradients are summed over ranks; default: the dtype of the forward",
        argument="reduce_dtype",
        value=lambda name, _: _DTYPES[name],
        stages=True,
    )
    dataloader_drop_last: bool = key(
        False,
        "drop samples of `training_data` that do not fill a micro-batch on every rank; otherwise the last micro-batch "
        "of an epoch is smaller, and some samples repeat",
        stages=True,
    )
    dump_state: bool = key(False, "print the resolved configuration when the engine is created", stages=True)
    wall_clock_breakdown: bool = key(
        False,
        "print the time of forward, backward and step with each printed line; with the section `parallel`, of the "
        "schedule and the step",
        needs=(_PRINTED,),
        stages=True,
    )
    memory_breakdown: bool = key(False, "print the memory use by part with each printed line", needs=(_PRINTED,))
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    parallel: ParallelConfig = ParallelConfig()
    sparse_attention: SparseAttentionConfig | None = key(
        None,
        option="sparse_attention",
        value=layout_of_section,
        needs=(Needs("dsgraph.compile", (True,), "only compiled attention can be block-sparse"),),
        stages=True,
    )
    compile: CompileConfig = CompileConfig()
    progressive_layer_drop: ProgressiveLayerDropConfig = ProgressiveLayerDropConfig()
    quantize_training: QuantizeTrainingConfig = QuantizeTrainingConfig()
    dsgraph: DsgraphConfig = DsgraphConfig()

    @property
    def is_parallel(self) -> bool:
        """True with the section `parallel`: several ranks may hold one copy of the model."""
        return bool(self.parallel.model_fields_set)

    @property
    def has_stages(self) -> bool:
        """True with pipeline stages."""
        return self.parallel.pp > 1

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype in which the forward computes; None for that of the parameters."""
        if self.fp16.enabled:
            return torch.float16
        return torch.bfloat16 if self.bf16.enabled else None
