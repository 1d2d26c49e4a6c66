"""Options of the backend: `torch.compile(model, backend="dsgraph", options={...})`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dsgraph.compat import compiled
from dsgraph.compat.inductor import inductor_mode, inductor_settings
from dsgraph.inductor_ext.sparse.layouts import Layout, SparseLayoutError
from dsgraph.inductor_ext.sparse.reading import layout_of
from dsgraph.partitioning.partition import partition
from dsgraph.passes import KERNELS, KernelSpec, Pipeline
from dsgraph.utils.byte_counts import TAKES_BYTES, read_bytes
from dsgraph.utils.errors import OptionError
from dsgraph.utils.nearest import nearest

PARTITION_ARGUMENTS = tuple(signature(partition).parameters)[1:]
"""The arguments of `dsgraph.partition` besides the model."""


class BackendOptions(BaseModel):
    """The options of the backend, the keys of `options=`. The description of a field is its type in error messages.

    Attributes:
        codegen: "inductor" compiles kernels; "eager" runs the transformed graphs uncompiled, which starts quickly. If
            neither this option nor `inductor` nor a mode is given, graphs around repeated blocks that compute and read
            little, such as a small norm, run uncompiled.
        pipeline: A `Pipeline`, or a list of passes and of names of built-in passes. None: `default_pipeline()`. Other
            options set their passes in it, and add optional passes such as `OffloadActivations`.
        gather_bucket_bytes: The most bytes of gathered parameters in one bucket, see `BucketForwardGathers`. None: the
            default of the passes, see `Bucketing`.
        reduce_bucket_bytes: The most bytes of gradients in one bucket, see `BucketReductions`. None: the default of the
            passes.
        overlap_comm: Start gathers before they are needed and wait for reductions after other work, see
            `PrefetchForwardGathers` and `DelayReductionWaits`. False leaves these passes out.
        read_ahead_bytes: The most bytes of parameters on disk that are being read, or are read and not used yet, see
            `StreamForwardParameters`. None: the default of the passes.
        verify: Check every graph after every pass, and name the pass that broke something. It takes 1 to 2 % of the
            time of a compile without Inductor.
        strict: Turn into errors what is otherwise only in `dsgraph.report(model)`: warnings, graph breaks, too many
            recompiles, functions that Dynamo gave up on, ops that Inductor has no lowering of, passes that switch
            torch's caches off, and values of checkpoint regions that are kept all the same.
        recompile_limit: With `strict`, the number of times that one function may be compiled. Dynamo itself stops at
            torch._dynamo.config.recompile_limit (8) and runs the function uncompiled from then on, without asking a
            backend: so the last compile that Dynamo allows is an error as well, and this number cannot exceed that one.
        memory_limit: Device memory that a step may use: a number of bytes, a text such as "60GiB", or a share such as
            0.8. A given limit is kept: activations that do not fit are recomputed; the planner picks the fastest plan
            that fits. It also bounds the memory that passes use for speed. Gathered parameters are kept for the
            backward as far as the rest of a step leaves room, see `SelectiveGather`. The number of gathers that start
            early, and of reductions that run late, is limited so that the predicted peak of the graph, with the states
            of an optimizer, stays below the limit. Default on CUDA: 90 % of the device's memory, or what this process
            has and can still allocate, whichever is less; the least of all ranks at their first compile. On the CPU
            there is no limit, and only the loss's last parameter is kept.
        activation_offload: Where activations are stored until the backward: "host" for host memory, "disk" for files in
            the folder for temporary files (TMPDIR), None for the device's memory. It moves every saved value of at
            least 64 KiB that is no parameter and no input of a graph, see `OffloadActivations`. With a given
            `memory_limit`, it moves as much as the fastest plan contains.
        partition_activations: True lets each tensor-parallel rank save only a slice of each activation that all ranks
            have alike; the backward gathers it, see `PartitionActivations`. It needs a model of `tensor_parallel`.
        sequence_parallel: True lets each tensor-parallel rank compute norms, dropout and residuals on its share of the
            tokens, whose memory they then take; a reduce-scatter and an all-gather replace each sum over these ranks,
            see `SliceTensors`. It needs a model of `tensor_parallel`, and sizes that are not dynamic.
        kernels: The kernels that replace sequences of ops, see `SubstituteKernels`: "auto" uses those that are expected
            to be faster, "none" none, a list exactly these, by name or as `KernelSpec` (`dsgraph.kernel` makes one of
            your own); with "auto" in the list, the automatic ones as well. With `strict`, a listed kernel that matches
            nowhere in a graph is an error, unless the graph calls torch's function that does the same.
        sparse_attention: A layout of `dsgraph.sparse`, or a dict such as `{"mode": "fixed", "block": 16}`: every
            self-attention computes only the blocks of the layout, see `SparsifyAttention`. None: all of them. With
            `strict`, a graph without any is an error.
        dump: Folder for a readable copy of every graph before and after every pass. Default: the environment variable
            DSGRAPH_DUMP, or nowhere.
        dump_compiles: Number of compiles of a process that are dumped into the folder; later ones are not.
        inductor: Inductor configuration for this model, by the names of `torch._inductor.config`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=True)

    codegen: Literal["inductor", "eager"] = "inductor"
    pipeline: Pipeline | tuple[Any, ...] | None = Field(default=None, description="a Pipeline or a list of passes")
    gather_bucket_bytes: int | None = Field(default=None, ge=1, description="a number of bytes, 1 or more")
    reduce_bucket_bytes: int | None = Field(default=None, ge=1, description="a number of bytes, 1 or more")
    overlap_comm: bool = Field(default=True, description="True or False")
    read_ahead_bytes: int | None = Field(default=None, ge=1, description="a number of bytes, 1 or more")
    verify: bool = Field(default=True, description="True or False")
    strict: bool = Field(default=False, description="True or False")
    recompile_limit: int = Field(default=8, ge=1, description="a number of compiles, 1 or more")
    memory_limit: int | float | None = Field(default=None, description=TAKES_BYTES)
    activation_offload: Literal["host", "disk"] | None = Field(default=None, description="'host', 'disk' or None")
    partition_activations: bool = Field(default=False, description="True or False")
    sequence_parallel: bool = Field(default=False, description="True or False")
    kernels: Literal["auto", "none"] | tuple[KernelSpec | Literal["auto"], ...] = Field(
        default="auto", description="'auto', 'none' or a list of kernels"
    )
    sparse_attention: Layout | None = Field(
        default=None, description="a layout of dsgraph.sparse, or a dict such as {'mode': 'fixed', 'block': 16}"
    )
    dump: Path | None = Field(default=None, description="the path of a folder")
    dump_compiles: int = Field(default=8, ge=1, description="a number of compiles, 1 or more")
    inductor: dict[str, Any] = Field(
        default_factory=dict, description="a dict from names of torch._inductor.config to values"
    )

    @field_validator("pipeline", mode="before")
    @classmethod
    def _from_list(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _bytes_from_text(cls, value: object) -> object:
        return read_bytes(value)

    @field_validator("kernels", mode="before")
    @classmethod
    def _kernels_by_name(cls, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return _refuse_namesakes(tuple(map(_kernel, value)))
        if isinstance(value, KernelSpec) or (isinstance(value, str) and any(spec.name == value for spec in KERNELS)):
            raise ValueError(f"it takes 'auto', 'none' or a list of kernels, such as [{value!r}]")
        return value

    @field_validator("sparse_attention", mode="before")
    @classmethod
    def _layout_of_section(cls, value: object) -> object:
        try:
            return layout_of(value) if isinstance(value, Mapping) else value
        except SparseLayoutError as error:
            raise ValueError(str(error)) from error

    @field_validator("dump", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return Path(value) if value and isinstance(value, str) else value


def parse_options(given: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> BackendOptions:
    """Check the user's options.

    Args:
        given: The value of `options=`.
        environ: The environment, by default this process's; DSGRAPH_DUMP is the default of `dump`.

    Raises:
        OptionError: A key is unknown or a value is wrong; the message names the nearest right one.
    """
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"options is {given!r}; it takes a dict, such as {{'codegen': 'eager'}}")
    values = dict(given or {})
    for key in values:
        if key not in BackendOptions.model_fields:
            if key in _OF_COMPILE:
                raise OptionError(f"unknown option {key!r}: write dsgraph.compile(model, {key}=...), which takes it")
            if key in PARTITION_ARGUMENTS:
                raise OptionError(f"unknown option {key!r}: write dsgraph.partition(model, {key}=...), which takes it")
            known = list(BackendOptions.model_fields)
            hint = nearest(str(key), known) or nearest(str(key), PARTITION_ARGUMENTS, where="of dsgraph.partition")
            raise OptionError(f"unknown option {key!r}{hint}; known: {', '.join(sorted(known))}")
    if environ.get("DSGRAPH_DUMP"):
        values.setdefault("dump", environ["DSGRAPH_DUMP"])
    try:
        options = BackendOptions(**values)
    except ValidationError as error:
        raise OptionError(_describe(error)) from None
    _refuse_without_effect(options, values)
    if options.inductor and options.codegen != "inductor":
        raise OptionError(f"option 'inductor' has no effect with codegen={options.codegen!r}: remove one of the two")
    if options.inductor:
        known = inductor_settings()
        for key in options.inductor:
            if key not in known:
                raise OptionError(
                    f"option 'inductor' sets {key!r}, which is no setting of Inductor{nearest(key, known)}"
                )
    return options


def _kernel(item: object) -> KernelSpec | Literal["auto"]:
    if isinstance(item, KernelSpec):
        return item
    if item == "auto":
        return "auto"
    if callable(item):
        name = getattr(item, "__name__", repr(item))
        raise ValueError(f"it holds {name}, which is no kernel: write @dsgraph.kernel() above the function")
    if item == "few_rows_linear":
        raise ValueError("it holds 'few_rows_linear', which is called 'skinny_linear' now")
    known = {spec.name: spec for spec in KERNELS}
    if not isinstance(item, str) or item not in known:
        raise ValueError(f"it holds {item!r}{nearest(str(item), list(known))}; known: {', '.join(sorted(known))}")
    return known[item]


def _refuse_namesakes(kernels: tuple[KernelSpec | Literal["auto"], ...]) -> tuple[KernelSpec | Literal["auto"], ...]:
    """Return the kernels, each once; refuse two of one name, because notes, errors and the report use names."""
    takes_automatic = "auto" in kernels
    found = {spec.name: spec for spec in KERNELS} if takes_automatic else {}
    asked = [spec for spec in kernels if isinstance(spec, KernelSpec)]
    for spec in asked:
        other = found.setdefault(spec.name, spec)
        if other is not spec:
            raise ValueError(
                f"it holds two kernels of the name {spec.name!r} ({other.op} and {spec.op}): rename the function of "
                "one, or leave one out"
            )
    each_once = tuple(dict.fromkeys(asked))
    return ("auto", *each_once) if takes_automatic else each_once


def _refuse_without_effect(options: BackendOptions, given: Mapping[str, Any]) -> None:
    if "dump_compiles" in given and options.dump is None:
        raise OptionError("option 'dump_compiles' has no effect without 'dump' (or DSGRAPH_DUMP): remove it, or add it")
    if "recompile_limit" not in given:
        return
    if not options.strict:
        raise OptionError("option 'recompile_limit' has no effect without strict=True: remove it, or add the other")
    last = compiled.recompile_limit()
    if options.recompile_limit > last:
        raise OptionError(
            f"option 'recompile_limit' is {options.recompile_limit}, but Dynamo stops at {last}: raise "
            "torch._dynamo.config.recompile_limit as well"
        )


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Return Inductor's configuration for a mode of `torch.compile`.

    Raises:
        OptionError: There is no such mode.
    """
    if mode is None:
        return {}
    try:
        return inductor_mode(mode)
    except Exception as error:
        raise OptionError(f"mode {mode!r} is not one of Inductor's: {error}") from error


_OF_COMPILE = ("mode", "fullgraph", "dynamic")
"""Arguments of `dsgraph.compile` that are not options of the backend."""


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    name, found = first["loc"][0], first["input"]
    if name == "codegen":
        known = ["inductor", "eager"]
        return f"option {name!r} is {found!r}{nearest(str(found), known)}; it takes {first['ctx']['expected']}"
    if first["type"] == "value_error":
        return f"option {name!r} is {found!r}: {first['msg'].removeprefix('Value error, ')}"
    return f"option {name!r} is {found!r}; it takes {BackendOptions.model_fields[str(name)].description}"
