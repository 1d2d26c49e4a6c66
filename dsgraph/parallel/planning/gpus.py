"""GPUs and their usual nodes, by their makers' data sheets. Without torch, for the command line.

Peaks are those of `passes/analysis/hardware.py`, which imports torch; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dsgraph.utils.errors import LayoutError
from dsgraph.utils.nearest import nearest

GIB = 2**30


@dataclass(frozen=True)
class NodeGpu:
    """A GPU in a node of its usual kind.

    Attributes:
        name: Its name for `dsgraph plan --gpu`.
        memory_bytes: Its memory.
        peak_flops: Dense bf16 or fp16 operations a second of its tensor cores, without sparsity.
        per_node: GPUs of a node.
        inside_bytes_per_s: Bytes a second that it sends to GPUs of its node, in one direction.
        across_bytes_per_s: Bytes a second that it sends to other nodes: its part of the node's adapters.
        node: The node whose links these are.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    per_node: int
    inside_bytes_per_s: float
    across_bytes_per_s: float
    node: str


_ALL = (
    # 150 GB/s of NVLink 2 through NVSwitch, eight adapters of 100 Gbit/s for sixteen GPUs.
    NodeGpu("v100-32gb", 32 * GIB, 125e12, 16, 150e9, 6.25e9, "DGX-2"),
    # 300 GB/s of NVLink 3, one adapter of 200 Gbit/s a GPU.
    NodeGpu("a100-40gb", 40 * GIB, 312e12, 8, 300e9, 25e9, "DGX A100"),
    NodeGpu("a100-80gb", 80 * GIB, 312e12, 8, 300e9, 25e9, "DGX A100"),
    # 450 GB/s of NVLink 4, one adapter of 400 Gbit/s a GPU.
    NodeGpu("h100-80gb", 80 * GIB, 989e12, 8, 450e9, 50e9, "DGX H100"),
    # Sold as 141 GB; its driver reports a little more than 140 GiB.
    NodeGpu("h200", 140 * GIB, 989e12, 8, 450e9, 50e9, "DGX H200"),
)

NODE_GPUS: Mapping[str, NodeGpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})


def gpu_of(name: str) -> NodeGpu:
    """Return the GPU of this name.

    Raises:
        LayoutError: There is none.
    """
    if name not in NODE_GPUS:
        raise LayoutError(f"gpu is {name!r}{nearest(name, NODE_GPUS)}; known: {', '.join(NODE_GPUS)}")
    return NODE_GPUS[name]
