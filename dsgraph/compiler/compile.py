"""`compile`: partition and torch.compile in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.partitioning.partition import partition
from dsgraph.utils.errors import OptionError
from dsgraph.utils.nearest import nearest

from .build_pipeline import bind_options
from .options import PARTITION_ARGUMENTS, BackendOptions, mode_settings, parse_options

_PARTITION_OPTIONS = tuple(name for name in PARTITION_ARGUMENTS if name not in ("mesh", "stage"))  # has them already
_TORCH_OPTIONS = ("fullgraph", "dynamic", "mode")


def compile(model: nn.Module, mesh: DeviceMesh | None = None, stage: int | None = None, **options: Any) -> nn.Module:
    """Partition a model and compile it with this backend.

    Args:
        model: See `partition`.
        mesh: See `partition`.
        stage: ZeRO stage, see `partition`.
        **options: Arguments of `partition` (param_dtype, reduce_dtype, keep_whole_below, blocks, offload,
            cast_forward_inputs), options of the backend (see `BackendOptions`), and fullgraph, dynamic and mode of
            `torch.compile`.

    Returns:
        The compiled model.

    Raises:
        OptionError: An option is unknown or wrong; nothing was changed.
        PartitionError: See `partition`.
    """
    known = [*_PARTITION_OPTIONS, *_TORCH_OPTIONS, *BackendOptions.model_fields]
    for name in options:
        if name not in known:
            raise OptionError(
                f"compile: unknown option {name!r}{nearest(name, known)}; known: {', '.join(sorted(known))}"
            )
    for_partition = {name: options.pop(name) for name in _PARTITION_OPTIONS if name in options}
    for_torch = {name: options.pop(name) for name in _TORCH_OPTIONS if name in options}
    _check_torch_options(for_torch)
    mode = for_torch.pop("mode", None)
    if mode is not None:  # torch.compile takes a mode or options, never both
        options["inductor"] = _with_mode(mode, parse_options(options))
    bind_options(parse_options(options))  # raises before anything is changed
    partitioned = partition(model, mesh, stage=stage, **for_partition)
    return torch.compile(partitioned, backend="dsgraph", options=options or None, **for_torch)  # type: ignore[return-value]


def _check_torch_options(given: Mapping[str, Any]) -> None:
    """Raise an error for values that torch.compile would silently accept."""
    if not isinstance(given.get("fullgraph", False), bool):
        raise OptionError(f"compile: fullgraph is {given['fullgraph']!r}; it takes True or False")
    dynamic = given.get("dynamic")
    if dynamic is not None and not isinstance(dynamic, bool):
        raise OptionError(f"compile: dynamic is {dynamic!r}; it takes True, False or None")
    mode = given.get("mode")
    if mode is not None and not isinstance(mode, str):
        raise OptionError(f"compile: mode is {mode!r}; it takes a text such as 'max-autotune', or None")


def _with_mode(mode: str, options: BackendOptions) -> dict[str, Any]:
    """Return Inductor's configuration for a mode, updated by the user's own."""
    settings = mode_settings(mode)
    if options.codegen != "inductor":
        raise OptionError(f"mode {mode!r} has no effect with codegen={options.codegen!r}: remove one of the two")
    for name, value in options.inductor.items():
        if settings.get(name, value) != value:
            raise OptionError(
                f"{name!r} is given twice: mode {mode!r} sets it to {settings[name]!r}, option 'inductor' to "
                f"{value!r}; remove one of the two"
            )
    return {**settings, **options.inductor}
