"""Buffers of a partitioned model: every rank starts with the values of the mesh's first rank."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.partitioning.rows import broadcast_from_first
from dsgraph.partitioning.state import PartitionState, held_by, hold
from dsgraph.partitioning.transforms.quantized_weight import scales_of


def new_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the buffers that do not have the first rank's values yet: name, module, name there, buffer.

    The scales of quantized weights are among them.
    """
    for prefix, module in model.named_modules():
        known = held_by(module).equal_buffers if "_dsgraph" in module.__dict__ else ()
        for attribute, buffer in (module._buffers | scales_of(module)).items():
            if buffer is not None and not buffer.is_meta and attribute not in known:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, buffer


def describe_buffer(name: str, buffer: Tensor) -> str:
    """Return what must be equal on all ranks before `equalise_buffers`.

    This includes the values of buffers that it cannot write to.
    """
    values = "" if can_be_sent(buffer) else f", values {_digest(buffer)}"
    return f"buffer {name}: {list(buffer.shape)} {buffer.dtype}{values}"


def equalise_buffers(model: nn.Module, part: PartitionState) -> None:
    """Give all new buffers of `model` the first rank's values, in one message. All ranks call it together."""
    found = list(new_buffers(model))
    send_buffers({id(buffer): buffer for *_, buffer in found}.values(), part.parameter_mesh)
    for _, module, attribute, _ in found:
        hold(module, part).equal_buffers.add(attribute)


def send_buffers(buffers: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Overwrite buffers on all ranks of the mesh with those of the first. They travel as bytes, of any dtype."""
    sent = [buffer.detach() for buffer in buffers if can_be_sent(buffer)]
    values = [buffer.contiguous().reshape(-1).view(torch.uint8).to(mesh.device_type) for buffer in sent]
    if not values:
        return
    together = torch.cat(values)
    broadcast_from_first(together, mesh)
    for buffer, own, first in zip(sent, values, together.split([value.numel() for value in values]), strict=True):
        if not torch.equal(own, first):
            buffer.copy_(first.to(buffer.device).clone().view(buffer.dtype).view(buffer.shape))


def can_be_sent(buffer: Tensor) -> bool:
    """Return whether it is a plain tensor whose elements do not share memory."""
    if type(buffer) is not Tensor or buffer.layout is not torch.strided:
        return False
    return all(stride > 0 or size <= 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _digest(buffer: Tensor) -> str:
    file = io.BytesIO()
    torch.save(buffer, file)
    return hashlib.sha256(file.getvalue()).hexdigest()[:12]
