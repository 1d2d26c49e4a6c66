"""Messages between the ranks of a group, for the ops `*_by_messages`.

gloo starts to send as soon as it knows that the other side is ready to receive. This notification queues after the
bytes that are being sent on the same connection. A rank that sends first and posts its receive later, as gloo's own
all-to-all may, gets its bytes only when its own are sent: half the speed of a full-duplex link. Here every receive is
posted before the first byte is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dsgraph.inductor_ext.compat import backend_name, register_work

# Apart from a user's own messages, whose tag is 0 by default. Messages of one tag arrive in the order in which they
# were sent, and all ranks run the same collectives in the same order.
_TAG = 0xD5


def sends_messages(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether messages are supported: on gloo, which sends them only from host memory."""
    return device.type == "cpu" and backend_name(group, "cpu") == "gloo"


@dataclass(frozen=True)
class Messages:
    """One tensor's messages with every other rank of a group.

    Attributes:
        result: The tensor to wait for.
        receive: For each rank, the destination of its message; contiguous.
        send: For each rank, the tensor to send; contiguous, not to be written to before the end.
    """

    result: Tensor
    receive: Sequence[Tensor]
    send: Sequence[Tensor]


def start_messages(tensors: Sequence[Messages], group: ProcessGroup) -> None:
    """Start the messages of several tensors at once; `wait_tensor` of a tensor's `result` ends that tensor's.

    Args:
        tensors: The messages of each tensor, in the same order on every rank of the group.
        group: The process group.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for tensor in tensors:
        for rank in others:
            work = dist.irecv(tensor.receive[rank], group=group, group_src=rank, tag=_TAG)
            register_work(tensor.result, work)
    for tensor in tensors:
        for rank in others:
            register_work(tensor.result, dist.isend(tensor.send[rank], group=group, group_dst=rank, tag=_TAG))
