"""Every private torch API that the compiler uses, in one place.

Checked on torch 2.11.0, 2.12.1 and 2.13.0.
"""

from __future__ import annotations

from torch._functorch._aot_autograd.descriptors import AOTInput, PlainAOTInput, SubclassGetAttrAOTInput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensorMode",
    "captured_input",
    "detect_fake_mode",
    "min_cut_rematerialization_partition",
]


def captured_input(placeholder: Node) -> int | None:
    """Which input of the captured graph a placeholder of the joint graph came from; None for tangents and the like.

    AOTAutograd takes a `DTensor` input apart into its shard and its mesh; both come from the same input.
    """
    desc: AOTInput | None = placeholder.meta.get("desc")
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None
