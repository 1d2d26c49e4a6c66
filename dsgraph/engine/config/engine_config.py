"""The configuration of the engine: sections, names and defaults of DeepSpeed's JSON file, and one section of our own.

`docs/config.md` is written from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo

from dsgraph.utils.byte_counts import read_bytes

from .offload_config import OffloadOptimizerConfig, OffloadParamConfig
from .quantize_config import QuantizeTrainingConfig
from .section import PathText, Section

Bytes = Annotated[int | float, BeforeValidator(read_bytes)]
"""A number of bytes, a text that means one, or a share of the device."""


class OptimizerConfig(Section):
    """Which optimizer is made, unless the caller brings one."""

    type: str = Field(
        description="`AdamW`, `Adam`, `Lamb`, `Muon` (with AdamW for what is no matrix inside the model), `OneBitAdam` "
        "or `OneBitLamb` (docs/compressed.md), or the name of a class of `torch.optim`. `Adam` decouples the weight "
        "decay as `AdamW` does unless its parameter `adam_w_mode` is false, as in DeepSpeed"
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="what its constructor is given. `OneBitAdam` takes `lr`, `freeze_step`, `betas`, `eps` and "
        "`weight_decay`; `OneBitLamb` takes `max_coeff`, `min_coeff`, `coeff_beta`, `factor_max`, `factor_min` and "
        "`factor_threshold` as well; DeepSpeed's `cuda_aware` and `comm_backend_name` have no effect on them",
    )


class SchedulerConfig(Section):
    """Which schedule of learning rates is made, unless the caller brings one."""

    type: str = Field(description="`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `LRRangeTest` or `OneCycle`")
    params: dict[str, Any] = Field(default_factory=dict, description="what its constructor is given")


class Fp16Config(Section):
    """Training in float16, with the loss scaled so that small gradients survive."""

    enabled: bool = Field(default=False, description="the forward sees parameters in float16; shards stay in float32")
    loss_scale: float = Field(default=0, ge=0, description="a fixed scale of the loss; 0: a dynamic one")
    initial_scale_power: int = Field(default=16, ge=0, description="the dynamic scale begins at 2 to this power")
    loss_scale_window: int = Field(default=1000, ge=1, description="steps without overflow until the scale doubles")
    hysteresis: int = Field(default=2, ge=1, description="overflows until the scale halves")
    consecutive_hysteresis: bool = Field(
        default=False, description="whether a step without overflow makes the count of overflows begin anew"
    )
    min_loss_scale: float = Field(default=1, gt=0, description="an overflow at this scale is an error")


class Bf16Config(Section):
    """Training in bfloat16, which needs no scale."""

    enabled: bool = Field(default=False, description="the forward sees parameters in bfloat16; shards stay in float32")
    check_grad_overflow: bool = Field(
        default=True, description="whether a step with gradients that are not finite is skipped"
    )


class ZeroConfig(Section):
    """What is split over ranks."""

    stage: Literal[0, 1, 2, 3] = Field(default=0, description="ZeRO stage, see `dsgraph.partition`")
    param_persistence_threshold: int | None = Field(
        default=None,
        ge=0,
        validation_alias=AliasChoices("stage3_param_persistence_threshold", "param_persistence_threshold"),
        description="parameters with fewer elements stay replicated; without it those of fewer than 16,384",
    )
    reduce_bucket_size: int | None = Field(
        default=None, ge=1, description="elements of gradients that travel as one collective, at most"
    )
    allgather_bucket_size: int | None = Field(
        default=None, ge=1, description="elements of parameters that travel as one collective, at most"
    )
    overlap_comm: bool | None = Field(
        default=None, description="`false` leaves out the passes that let collectives run beside computation"
    )
    offload_optimizer: OffloadOptimizerConfig = Field(
        default_factory=OffloadOptimizerConfig, description="where the optimizer's state lies, see docs/offload.md"
    )
    offload_param: OffloadParamConfig = Field(
        default_factory=OffloadParamConfig, description="where parameters lie, with stage 3, see docs/offload.md"
    )


class FlopsProfilerConfig(Section):
    """What each module of the model computes, printed once: see docs/engine.md."""

    enabled: bool = Field(default=False, description="whether a profile is made")
    profile_step: int = Field(default=1, ge=1, description="it is made behind so many steps")
    module_depth: int = Field(default=-1, ge=-1, description="how deep the table of each depth goes; -1: to the last")
    top_modules: int = Field(default=1, ge=1, description="how many modules of each depth that table names")
    detailed: bool = Field(default=True, description="whether the tree of all modules is shown")
    output_file: PathText | None = Field(default=None, description="where it is written; without it, it is printed")


class TensorboardConfig(Section):
    """Scalars of each step for TensorBoard, which `pip install dsgraph[tensorboard]` brings."""

    enabled: bool = Field(default=False, description="whether they are written")
    output_path: PathText = Field(default="", description="the folder in which the job has its own; relative to here")
    job_name: str = Field(default="DeepSpeedJobName", description="the job's folder")


class CsvMonitorConfig(Section):
    """Scalars of each step as CSV files, one file a scalar."""

    enabled: bool = Field(default=False, description="whether they are written")
    output_path: PathText = Field(default="", description="the folder in which the job has its own; relative to here")
    job_name: str = Field(default="DeepSpeedJobName", description="the job's folder")


class DataTypesConfig(Section):
    """Dtypes besides those of the forward."""

    grad_accum_dtype: Literal["fp32"] | None = Field(
        default=None, description="micro-batches are added up in the dtype of the shards, with the key and without it"
    )


class ActivationCheckpointingConfig(Section):
    """What becomes of activations between the forward and the backward."""

    cpu_checkpointing: bool = Field(
        default=False,
        description="moves what the backward needs to the host's memory behind its last use in the forward, and back "
        "in time. Of what `torch.utils.checkpoint` or `dsgraph.checkpointing.checkpoint` marks, these are its inputs",
    )


class ParallelConfig(Section):
    """The ranks that share a model, besides those that take parts of a batch: see docs/parallelism.md."""

    dp: int = Field(default=1, ge=1, description="ranks that take parts of a batch, over which ZeRO shards")
    tp: int = Field(default=1, ge=1, description="neighbouring ranks that share every layer")
    pp: int = Field(default=1, ge=1, description="ranks that have some of the layers each")
    schedule: str = Field(default="1F1B", description="the order in which stages work, see `dsgraph schedule`")
    split: Literal["auto"] | tuple[str, ...] = Field(
        default="auto", description="the modules with which the second and later stages begin"
    )


class SparseAttentionConfig(Section):
    """Which blocks of scores self-attention computes, see docs/sparse.md; each mode has keys of its own."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] = Field(
        default="fixed", description="the layout"
    )
    block: int | None = Field(default=None, description="queries and keys of a block; without it 16")
    different_layout_per_head: bool | None = Field(default=None, description="whether heads may differ")
    num_local_blocks: int | None = Field(default=None, description="fixed: blocks of a window")
    num_global_blocks: int | None = Field(
        default=None, description="fixed: blocks of each window that all see; bigbird: first blocks that all see"
    )
    attention: Literal["bidirectional", "unidirectional"] | None = Field(
        default=None, description="whether queries see later keys"
    )
    horizontal_global_attention: bool | None = Field(
        default=None, description="fixed, variable: whether queries of global blocks see all keys"
    )
    num_different_global_patterns: int | None = Field(
        default=None, description="fixed: how many places in a window heads take turns at"
    )
    num_random_blocks: int | None = Field(default=None, description="variable, bigbird: blocks at random a row")
    local_window_blocks: tuple[int, ...] | None = Field(default=None, description="variable: sizes of the windows")
    global_block_indices: tuple[int, ...] | None = Field(
        default=None, description="variable, bslongformer: blocks that all see"
    )
    global_block_end_indices: tuple[int, ...] | None = Field(
        default=None, description="variable, bslongformer: behind which block each of those ends"
    )
    num_sliding_window_blocks: int | None = Field(
        default=None, description="bigbird, bslongformer, local: width of the window"
    )
    seed: int | None = Field(default=None, description="variable, bigbird: of the random blocks")


class ProgressiveLayerDropConfig(Section):
    """Blocks of the model are left out in training, at random: see docs/compressed.md."""

    enabled: bool = Field(default=False, description="whether they are")
    theta: float = Field(
        default=0.5, gt=0, le=1, description="what the last block's probability to be kept goes down to"
    )
    gamma: float = Field(default=0.001, ge=0, description="how fast: the rest shrinks by exp(-gamma) a step")
    blocks: tuple[str, ...] | None = Field(
        default=None, description="names of the lists of blocks; without it all lists of equal blocks"
    )


class DsgraphConfig(Section):
    """What DeepSpeed's file has no word for: options of the backend (docs/options.md), and the loader's processes."""

    codegen: Literal["inductor", "eager"] = Field(default="inductor", description="how graphs become programs")
    compile: bool = Field(default=True, description="`false` runs the model uncompiled")
    pipeline: tuple[str, ...] | None = Field(
        default=None, description="names of the passes that run, in their order; without it the default ones"
    )
    memory_limit: Bytes | None = Field(
        default=None, description='what a step may use: bytes, a text such as "60GiB", or a share of the device'
    )
    offload_folder: PathText | None = Field(
        default=None,
        description="a folder on a disk, for what of the model's states does not fit into half of `memory_limit`",
    )
    host_memory_limit: Bytes | None = Field(
        default=None,
        description="for a model on CUDA: as much of the host's memory may hold what of the model's states does not "
        "fit into half of `memory_limit`",
    )
    delayed_update: bool = Field(
        default=False,
        description='with `zero_optimization.offload_optimizer.device` "cpu": the host computes each update beside the '
        "next step's gradients, and it is applied one step late",
    )
    kernels: Literal["auto", "none"] | tuple[str, ...] = Field(
        default="auto", description="which kernels stand in for what a model spells out"
    )
    strict: bool = Field(default=False, description="whether what was not done is an error")
    num_workers: int = Field(
        default=0, ge=0, description="processes of each rank that load `training_data`; 0: the rank itself does"
    )
    metrics_file: str | None = Field(
        default=None, description="a file to which the scalars of each step are added, one JSON object a line"
    )


class CheckpointConfig(Section):
    """How checkpoints are saved."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"], BeforeValidator(lambda v: v.capitalize() if isinstance(v, str) else v)
    ] = Field(
        default="Warn",
        description="what happens where ranks give different tags: `Fail` is an error, `Warn` prints that the first "
        "rank's counts, with `Ignore` it counts silently",
    )


class EngineConfig(Section):
    """The whole file."""

    train_batch_size: int | None = Field(default=None, ge=1, description="samples of a step, over all ranks")
    train_micro_batch_size_per_gpu: int | None = Field(
        default=None, ge=1, description="samples of a micro-batch of one rank"
    )
    gradient_accumulation_steps: int | None = Field(default=None, ge=1, description="micro-batches of a step")
    steps_per_print: int | None = Field(default=None, ge=1, description="steps from one printed line to the next")
    gradient_clipping: float = Field(default=1.0, ge=0, description="largest global norm of gradients; 0: any")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(
        default=None, description="dtype in which gradients are summed over ranks; without it that of the forward"
    )
    dataloader_drop_last: bool = Field(
        default=False,
        description="whether samples of `training_data` that do not fill a micro-batch on every rank are left out of "
        "an epoch; otherwise its last micro-batch is smaller, and some samples come twice",
    )
    dump_state: bool = Field(default=False, description="prints the resolved configuration when the engine is made")
    wall_clock_breakdown: bool = Field(
        default=False, description="how long forward, backward and step take, behind each printed line"
    )
    memory_breakdown: bool = Field(default=False, description="what memory holds, behind each printed line")
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
    sparse_attention: SparseAttentionConfig | None = None
    progressive_layer_drop: ProgressiveLayerDropConfig = ProgressiveLayerDropConfig()
    quantize_training: QuantizeTrainingConfig = QuantizeTrainingConfig()
    dsgraph: DsgraphConfig = DsgraphConfig()


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a section of the file; None for a plain value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
