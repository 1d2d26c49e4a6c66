"""The values of a rank's stages: its own parameters, which start with the first rank's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsgraph.passes.parallel.stages.stage_graphs import StageGraph
from dsgraph.ranks.agreement import Agreement
from dsgraph.utils.errors import OptionError

Materialize = Callable[[str, Tensor], Tensor]


def own_values(
    graphs: Sequence[StageGraph], held: Sequence[int], *, device: torch.device, materialize: Materialize | None
) -> dict[str, Tensor]:
    """Move this rank's parameters and buffers to their device; stages that read one parameter share it.

    Args:
        graphs: All stages.
        held: This rank's stages.
        device: Device of the stages.
        materialize: Return the values of a tensor that is on the meta device.

    Returns:
        Parameters and buffers of this rank's stages by name.
    """
    given: dict[str, Tensor] = {}
    for number in held:
        for name, tensors, leaf in _places(graphs[number]):
            if name not in given:
                given[name] = _real(name, tensors[leaf], device=device, materialize=materialize)
            tensors[leaf] = given[name]
    return given


def share_first_values(
    graphs: Sequence[StageGraph],
    held: Sequence[Sequence[int]],
    own: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup,
    agreement: Agreement,
) -> None:
    """Overwrite the stages' parameters and buffers with those of the pipeline's first rank. All its ranks call it.

    Ranks may have built the model with different seeds. If a rank's model is on the meta device, each parameter
    keeps what its first stage's rank has materialized.

    Args:
        graphs: All stages; on the first rank with the values of its model.
        held: The stages of each rank.
        own: This rank's parameters and buffers by name.
        group: The ranks of the pipeline.
        agreement: The agreement of these ranks.
    """
    values = {name: tensors[leaf] for graph in graphs for name, tensors, leaf in _places(graph)}
    values.update(own)
    said = agreement.exchange("whether their models have values", str(any(one.is_meta for one in values.values())))
    first_has_all = not any(text == "True" for text in said.values())
    me = group.rank()
    for name, holders in _holders(graphs, held).items():
        source = 0 if first_has_all else holders[0]
        for other in holders:
            if me == source != other:
                _send(values[name], other, group)
            elif me == other != source:
                _receive(values[name], source, group)


def fetch_missing(
    graphs: Sequence[StageGraph],
    own: Mapping[str, Tensor],
    stages: Mapping[str, Sequence[int]],
    *,
    rank_of: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Send each stage the buffers that only other ranks hold. All ranks of the pipeline call it.

    Args:
        graphs: Stages, cut at other places than those that `stages` describes.
        own: This rank's parameters and buffers by name.
        stages: The stages that hold each of them, of all ranks.
        rank_of: The rank of each stage.
        group: The ranks of the pipeline.
        device: Their device.
    """
    me = group.rank()
    for number, graph in enumerate(graphs):
        for name, tensors, leaf in list(_places(graph)):
            target, holders = rank_of[number], [rank_of[stage] for stage in stages[name]]
            if target in holders:
                continue
            if me == holders[0]:
                _send(own[name], target, group)
            elif me == target:
                tensors[leaf] = torch.empty(tensors[leaf].shape, dtype=tensors[leaf].dtype, device=device)
                _receive(tensors[leaf], holders[0], group)


def _holders(graphs: Sequence[StageGraph], held: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Return the ranks that have each parameter and buffer, by name, in the order of the stages."""
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    found: dict[str, list[int]] = {}
    for number, graph in enumerate(graphs):
        for name in graph.parameters:
            ranks = found.setdefault(name, [])
            if rank_of[number] not in ranks:
                ranks.append(rank_of[number])
    return found


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.send(_bytes(tensor.detach().contiguous()), group=group, group_dst=rank)


def _receive(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    if not tensor.numel():
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dist.recv(_bytes(whole), group=group, group_src=rank)
    tensor.detach().copy_(whole)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes: not every backend sends every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _places(graph: StageGraph) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each parameter and buffer of a stage, the dict that contains it, and its key there."""
    for name in graph.parameters:
        path, _, leaf = name.rpartition(".")
        owner = graph.module.get_submodule(path)
        yield name, owner._parameters if leaf in owner._parameters else owner._buffers, leaf


def _real(name: str, tensor: Tensor, *, device: torch.device, materialize: Materialize | None) -> Tensor:
    if not tensor.is_meta:
        if tensor.device != device:
            raise OptionError(
                f"pipeline: {name!r} is on {tensor.device}, and the mesh is of {device}: move the model there"
            )
        return tensor
    if materialize is None:
        raise OptionError(f"pipeline: {name!r} is on the meta device: pass materialize=, which makes its values")
    value = materialize(name, tensor).detach().to(device)
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise OptionError(
            f"pipeline: materialize gave {value.dtype} of {tuple(value.shape)} for {name!r}, "
            f"which is {tensor.dtype} of {tuple(tensor.shape)}"
        )
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
