"""The section `dsgraph`: keys that DeepSpeed's file does not have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from dsgraph.utils.byte_counts import read_bytes

from .key import MODEL_DEVICE, NO_EFFECT, Needs, key
from .section import PathText, Section

Bytes = Annotated[int | float, BeforeValidator(read_bytes)]
"""A number of bytes, a text that means one, or a share of the device."""

_STATE = "zero_optimization.offload_optimizer"
_ALL_ON_HOST = "an update is delayed where all of the state is on the host"
_BELOW_CPU = Needs(MODEL_DEVICE, (), "below the CPU is the disk: use dsgraph.offload_folder", other_than="cpu")
_PLANNED = (
    Needs("dsgraph.memory_limit", (), "what does not fit into half of it is offloaded"),
    Needs(f"{_STATE}.device", ("none",), "the plan decides what is offloaded"),
    Needs("zero_optimization.offload_param.device", ("none",), "the plan decides what is offloaded"),
)


class DsgraphConfig(Section):
    """Keys that DeepSpeed's file does not have: backend options (docs/reference/options.md) and loader processes."""

    codegen: Literal["inductor", "eager"] | None = key(
        None,
        'code generator of compiled graphs; default: "inductor", but "eager" for light graphs around blocks',
        option="codegen",
        stages=True,
    )
    compile: bool = key(True, "`false` runs the model uncompiled", stages=True)
    pipeline: tuple[str, ...] | None = key(
        None, "names of the passes to run, in order; default: the default pipeline", option="pipeline"
    )
    blocks: Literal["auto", "none"] | tuple[str, ...] | None = key(
        None,
        "repeated blocks that are compiled once, see `dsgraph.partition`: `auto`, `none`, or names of lists of modules",
        argument="blocks",
        needs=(Needs("dsgraph.compile", (True,), "nothing is compiled", note=NO_EFFECT, not_for="none"),),
        stages=True,
    )
    memory_limit: Bytes | None = key(
        None,
        'maximum memory of a step: bytes, a text such as "60GiB", or a share of the device',
        option="memory_limit",
        stages=True,
    )
    offload_folder: PathText | None = key(
        None,
        "folder on a disk for model states that do not fit into half of `memory_limit`",
        needs=(Needs(MODEL_DEVICE, ("cpu",), "below a GPU is the host: use dsgraph.host_memory_limit"), *_PLANNED),
    )
    host_memory_limit: Bytes | None = key(
        None,
        "for a model on CUDA: maximum host memory for model states that do not fit into half of `memory_limit`",
        needs=(_BELOW_CPU, *_PLANNED),
    )
    delayed_update: bool = key(
        False,
        'with `zero_optimization.offload_optimizer.device` "cpu": compute each update on the host during the next '
        "step, and apply it one step late",
        needs=(
            Needs(f"{_STATE}.device", ("cpu",), _ALL_ON_HOST, unless="dsgraph.host_memory_limit"),
            Needs(f"{_STATE}.ratio", (1.0,), _ALL_ON_HOST, unless="dsgraph.host_memory_limit"),
        ),
    )
    kernels: Literal["auto", "none"] | tuple[str, ...] = key(
        "auto", "kernels to substitute for matching code of the model", option="kernels", stages=True
    )
    strict: bool = key(False, "raise an error if something requested was not done", option="strict", stages=True)
    num_workers: int = key(
        0, "loader processes per rank for `training_data`; 0: load in the rank's own process", ge=0, stages=True
    )
    metrics_file: str | None = key(
        None, "file to which the scalars of each step are appended, one JSON object per line", stages=True
    )
