"""`tensor_parallel`: layers that are sharded over ranks, each with its slices of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.partitioning.refusals import (
    refuse_early_optimizers,
    refuse_hidden_references,
    refuse_model,
    refuse_parameters,
)
from dsgraph.partitioning.rows import broadcast_from_first
from dsgraph.partitioning.state_dict.full_state_dict import take_rows
from dsgraph.partitioning.tensor_slices import sliced_parameter, slicing_class
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.passes.parallel.find_slices import FoundSlices, layer_pattern
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.mesh import axis_group
from dsgraph.utils.errors import PartitionError

from .tensor_plan import plan_by_graph, plan_by_names

ModelT = TypeVar("ModelT", bound=nn.Module)

# Below this share of tensor-parallel matrices a warning gives the reasons.
MOST = 0.5
_REASONS = 5


def tensor_parallel(
    model: ModelT, mesh: DeviceMesh, *, plan: Literal["auto"] | Mapping[str, Any] = "auto", example_inputs: Any = None
) -> ModelT:
    """Make `model` tensor-parallel over the ranks of `mesh`, in place: each rank holds its slices of the parameters.

    Every rank calls it with the same model; parameters get the values of the mesh's first rank. Create the optimizer
    afterwards. Then `torch.compile(model, backend="dsgraph")` computes with slices. Give all ranks of the mesh the same
    batches and the same random seeds. Run eagerly, the model gathers its parameters and computes the same as before.

    Column and row slices, and the places of their sums, are those of Shoeybi et al.: Megatron-LM, arXiv 1909.08053.

    Args:
        model: A module on one device.
        mesh: A mesh of one dimension, such as `mesh["tp"]`.
        plan: "auto" shards every matrix product that can be sharded, found on the captured graph. Otherwise a dict:
            pattern of names of modules or parameters (`*` for the number of a layer) -> "colwise", "rowwise", another
            style of transformers, or the DTensor styles of that name. `model.tp_plan` of transformers is such a dict.
        example_inputs: Arguments of the forward, of which only the shapes are used: a dict or a tuple. None: the
            model's `dummy_inputs`, which models of transformers have.

    Returns:
        `model` itself. `model.tensor_plan` lists the sharded parameters, and the others with reasons.

    Raises:
        PartitionError: An argument or a part of the model is not supported; nothing was changed.
        RanksDisagreeError: Ranks hold different models; nothing was changed.
    """
    refuse_model(model)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise PartitionError(f"tensor_parallel: mesh is {mesh!r}; it takes one dimension of a mesh, such as mesh['tp']")
    found = _find(model, mesh.size(), plan, example_inputs)
    little = _why_little(model, found) if plan == "auto" and mesh.size() > 1 else ""
    slice_parameters(model, mesh, found)
    if little and mesh.get_local_rank() == 0:
        warnings.warn(little, stacklevel=2)
    return model


def _why_little(model: nn.Module, found: FoundSlices) -> str:
    """Return a warning with reasons if most of a model stays replicated; empty if most is tensor-parallel."""
    tables = {name: param.numel() for name, param in model.named_parameters() if param.dim() > 1}
    whole = {name: size for name, size in tables.items() if name not in found.slices}
    total = sum(tables.values())
    if not total or sum(whole.values()) <= (1 - MOST) * total:
        return ""
    reasons: dict[str, int] = {}
    for name, size in whole.items():
        reason = found.whole.get(name, "no product with it is known")
        text = f"{layer_pattern(name)}: {reason}"
        reasons[text] = reasons.get(text, 0) + size
    largest = sorted(reasons, key=lambda text: -reasons[text])[:_REASONS]
    share = 1 - sum(whole.values()) / total
    return (
        f"tensor_parallel: {share:.0%} of the matrices of {type(model).__name__} are sharded, the others replicated "
        f"on each rank: {'; '.join(largest)}. model.tensor_plan has all of them. Give plan= to shard more, or use "
        "pipeline stages or ZeRO"
    )


def slice_parameters(model: nn.Module, mesh: DeviceMesh, found: FoundSlices) -> None:
    """Replace the parameters of `model` by this rank's slices, in place, by a plan.

    Args:
        model: A module on one device.
        mesh: A mesh of one dimension.
        found: The plan; parameters that the model lacks are ignored.

    Raises:
        PartitionError: A part of the model is not supported; nothing was changed.
        RanksDisagreeError: Ranks hold different models; nothing was changed.
    """
    parameters = dict(model.named_parameters())
    refuse_parameters(parameters)
    refuse_hidden_references(model, parameters)
    refuse_early_optimizers(parameters.values(), doing="tensor_parallel")
    _check_sizes(found, parameters, mesh.size())
    lines = [
        f"{name}: {list(param.shape)} {param.dtype} {found.slices.get(name)}" for name, param in parameters.items()
    ]
    Agreement.over(mesh).confirm("slice different models", lines)
    _apply(model, found, parameters, mesh)


def _find(model: nn.Module, ranks: int, plan: Any, example_inputs: Any) -> FoundSlices:
    inputs = example_inputs if example_inputs is not None else getattr(model, "dummy_inputs", None)
    if plan == "auto":
        if inputs is None:
            raise PartitionError(
                f"tensor_parallel: plan='auto' captures the model, and {type(model).__name__} has no dummy_inputs: "
                "pass example_inputs=, or a plan"
            )
        return plan_by_graph(model, inputs, ranks=ranks, given=None)
    if not isinstance(plan, Mapping):
        raise PartitionError(
            f"tensor_parallel: plan is {plan!r}; it takes 'auto' or a dict of names of modules, such as model.tp_plan"
        )
    given = plan_by_names(model, plan)
    if inputs is None:
        return FoundSlices(given)
    pieces = plan_by_graph(model, inputs, ranks=ranks, given=given)
    return FoundSlices(given | pieces.slices)


def _check_sizes(found: FoundSlices, parameters: Mapping[str, nn.Parameter], ranks: int) -> None:
    for name, held in found.slices.items():
        if name not in parameters:
            continue
        size = parameters[name].shape[held.dim]
        if size % (held.parts * ranks):
            raise PartitionError(
                f"tensor_parallel: {name!r} has {size} at dimension {held.dim}, which {ranks} ranks cannot share "
                f"evenly in {held.parts} pieces: leave it out of the plan"
            )


def _apply(model: nn.Module, found: FoundSlices, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    group = axis_group(mesh, 0).group_name
    held_by_id: dict[int, ParameterSlice] = {}
    made: dict[int, nn.Parameter] = {}
    for name, param in parameters.items():
        one = found.slices.get(name)
        held = ParameterSlice(one.dim if one else -1, one.parts if one else 1, mesh.size(), group)
        if not param.is_meta:  # on the meta device it is filled when it gets memory
            broadcast_from_first(param.detach(), mesh)
        held_by_id[id(param)], made[id(param)] = held, sliced_parameter(param, held, mesh)
    classes: dict[Any, type[nn.Module]] = {}
    for module in list(model.modules()):
        own = {name: param for name, param in module._parameters.items() if param is not None}
        if not own:
            continue
        slices = {name: held_by_id[id(param)] for name, param in own.items()}
        module._parameters.update({name: made[id(param)] for name, param in own.items()})
        key = (type(module), tuple(slices.items()))
        if key not in classes:
            classes[key] = slicing_class(type(module), slices, mesh)
        module.__class__ = classes[key]
        module.register_load_state_dict_pre_hook(take_rows)
    object.__setattr__(model, "tensor_plan", found)
