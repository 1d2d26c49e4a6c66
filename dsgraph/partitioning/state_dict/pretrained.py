"""Methods of transformers' models that use all of their parameters (save, resize, generate), and of PEFT's adapters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.refusals import refuse_early_optimizers
from dsgraph.partitioning.rows import full_value
from dsgraph.partitioning.state import PartitionState, held_by
from dsgraph.partitioning.transforms.parameter_transform import ParameterTransform
from dsgraph.ranks.agreement import Agreement
from dsgraph.utils.errors import PartitionError

from .full_state_dict import save_on_one_rank

TakeIn = Callable[[nn.Module], object]


def methods_for(original: type[nn.Module], *, take_in: TakeIn) -> Mapping[str, Any]:
    """Return the methods of a partitioned module that replace those of class `original`.

    These are `save_pretrained`, `resize_token_embeddings`, `generate`, and `_activate_lora` of PEFT. They call those of
    `original` for a model that is not partitioned, such as one of `type(model).from_pretrained(folder)`.

    For a forward that calls transformers' check for FSDP before it drops a layer, they include the attribute that this
    check reads. All ranks then run all layers.

    Args:
        original: The class.
        take_in: Partitions what is new in a partitioned model.
    """
    methods: dict[str, Any] = {}
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    if "is_fsdp_managed_module" in getattr(code, "co_names", ()):
        methods["_is_fsdp_managed_module"] = True
    saves = getattr(original, "save_pretrained", None)
    if callable(saves):
        methods["save_pretrained"] = _saving(saves)
    resizes = getattr(original, "resize_token_embeddings", None)
    if callable(resizes) and hasattr(original, "get_input_embeddings"):
        methods["resize_token_embeddings"] = _resizing(resizes, take_in)
    generates = getattr(original, "generate", None)
    if callable(generates) and "synced_gpus" in inspect.signature(generates).parameters:
        methods["generate"] = _generating(generates)
    if activates := getattr(original, "_activate_lora", None):
        methods["_activate_lora"] = _activating(activates)
    return methods


def _is_partitioned(model: nn.Module) -> bool:
    """Return False for a model that only has the class of a partitioned one."""
    return "_dsgraph" in model.__dict__


def _saving(saves: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(saves)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        save = partial(saves, self, *args, **kwargs)
        is_whole = not _is_partitioned(self) or kwargs.get("state_dict") is not None
        return save() if is_whole else save_on_one_rank(self, save)

    return save_pretrained


def _generating(generates: Callable[..., Any]) -> Callable[..., Any]:
    """Run `generate` with `synced_gpus` on by default, as transformers does for DeepSpeed and FSDP."""
    signature = inspect.signature(generates)

    @wraps(generates)
    def generate_on_all_ranks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_partitioned(self):
            return generates(self, *args, **kwargs)
        part = held_by(self).partition
        call = signature.bind_partial(self, *args, **kwargs)
        if call.arguments.get("synced_gpus") is not None or not part.zero.splits_parameters or part.mesh.size() == 1:
            return generates(self, *args, **kwargs)
        with part.operations.gathering("parameters to generate tokens", waits=True):
            pass  # otherwise a rank that generates alone would wait silently
        call.arguments["synced_gpus"] = True
        return generates(*call.args, **call.kwargs)

    return generate_on_all_ranks


class _Adapted(ParameterTransform):
    """The sum of a parameter and its adapters, in place of the parameter while its module runs."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def after_gather(self, full: Tensor) -> Tensor:
        """Return the sum."""
        return self.total


def _activating(activates: Callable[..., Any]) -> Callable[..., Any]:
    """Add the adapters of PEFT's `target_parameters` after the gather; PEFT's parametrization would move the shard."""

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        held = getattr(self.get_base_layer(), "_dsgraph", None)
        entry = held and held.parameters.get(self.parameter_name)
        if entry is None:
            with activates(self, active_adapters):
                yield
            return
        deltas = (self.get_delta_weight(adapter) for adapter in active_adapters if adapter in self.lora_A)
        before, entry.transforms = entry.transforms, (*entry.transforms, _Adapted(sum(deltas, self.get_param())))
        try:
            yield
        finally:
            entry.transforms = before

    return _activate_lora


def _resizing(resizes: Callable[..., Any], take_in: TakeIn) -> Callable[..., Any]:
    @wraps(resizes)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_partitioned(self):
            return resizes(self, *args, **kwargs)
        part = held_by(self).partition
        resized = {id(self.get_input_embeddings()), id(self.get_output_embeddings())}
        entries = [
            entry
            for entry in part.parameters
            # Tied parameters are tied again afterwards, all of them.
            if len(entry.owners) > 1 or any(id(module) in resized for module, _ in entry.owners)
        ]
        _refuse(entries, part)
        call = f"resize_token_embeddings{(*args, *kwargs.items())}"
        Agreement.over(part.parameter_mesh).confirm("resize differently", [call, *(entry.name for entry in entries)])
        _make_whole(entries)
        try:
            return resizes(self, *args, **kwargs)
        finally:
            take_in(self)

    return resize_token_embeddings


def _refuse(entries: list[ParameterState], part: PartitionState) -> None:
    part.refuse_amid_step("resize_token_embeddings")
    for entry in entries:
        if entry.param.is_meta:
            raise PartitionError(f"parameter {entry.name!r} is on the meta device: call dsgraph.materialize first")
        if entry.param.grad is not None:
            raise PartitionError(
                f"resize_token_embeddings: parameter {entry.name!r} has a gradient, which would be lost: call "
                "model.zero_grad() first"
            )
    refuse_early_optimizers([entry.param for entry in entries], doing="resize_token_embeddings")  # type: ignore[misc]


def _make_whole(entries: list[ParameterState]) -> None:
    """Replace shards by full parameters. All ranks call it together."""
    for entry in entries:
        whole = nn.Parameter(full_value(entry.param).clone(), requires_grad=entry.param.requires_grad)
        whole.__dict__.update(entry.param.__dict__)
        for module, attribute in entry.owners:
            module._parameters[attribute] = whole
