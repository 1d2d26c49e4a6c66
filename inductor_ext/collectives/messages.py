"""Messages between the ranks of a group: what the ops `*_by_messages` are made of.

gloo starts to send as soon as it knows that the other side is ready to receive, and what it has to say on a connection
queues up behind the bytes that are being sent there. Whoever sends first and offers to receive afterwards, as gloo's
own all-to-all may, gets its bytes only when its own are through: half the speed of a link that carries both ways at
once. Here every receive is offered before the first byte is sent.
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
    """Whether messages are the way to go: on gloo, which sends them from the host's memory alone."""
    return device.type == "cpu" and backend_name(group, "cpu") == "gloo"


@dataclass(frozen=True)
class Messages:
    """One tensor's messages with every other rank of a group.

    Attributes:
        result: What is waited for.
        receive: For each rank, where its message goes; contiguous.
        send: For each rank, what it is sent; contiguous, not to be written to before the end.
    """

    result: Tensor
    receive: Sequence[Tensor]
    send: Sequence[Tensor]


def start_messages(tensors: Sequence[Messages], group: ProcessGroup) -> None:
    """Starts the messages of several tensors at once; `wait_tensor` of a tensor's `result` ends that tensor's.

    Args:
        tensors: In the same order on every rank of the group.
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
