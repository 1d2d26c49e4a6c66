"""How fast devices compute and links carry: what is documented here, or what `dsgraph calibrate` has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Link:
    """A connection between ranks: a message of n bytes takes `latency_s + n / bytes_per_s` (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float

    def of(self, kind: str) -> Link:
        """Itself: the same for every kind of collective."""
        return self

    def has(self, kind: str) -> bool:
        """Whether there are figures of this kind by itself: there are not."""
        return False


@dataclass(frozen=True)
class LinkTable:
    """A connection that a backend uses better for some kinds of collectives than for others.

    Attributes:
        usual: For every kind that is not listed.
        kinds: Kind of collective (as `collective_kind` names it), its link; each kind once.
    """

    usual: Link
    kinds: tuple[tuple[str, Link], ...] = ()

    def of(self, kind: str) -> Link:
        """The link that a kind of collective sees."""
        return next((link for name, link in self.kinds if name == kind), self.usual)

    def has(self, kind: str) -> bool:
        """Whether there are figures of this kind by itself."""
        return any(name == kind for name, _ in self.kinds)


@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        flops_per_s: Floating-point operations a second that a large matrix product reaches.
        bytes_per_s: Bytes a second that a large copy reads and writes.
        kernel_s: Seconds that a kernel takes which does nothing.
        of_dtype: Name of a dtype (without `torch.`), its operations a second where they are others than `flops_per_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float
    of_dtype: tuple[tuple[str, float], ...] = ()

    def rate(self, dtype: torch.dtype | None) -> float:
        """Floating-point operations a second on a dtype; None for one that is not known."""
        name = str(dtype).removeprefix("torch.")
        return next((rate for listed, rate in self.of_dtype if listed == name), self.flops_per_s)


# Device type -> orders of magnitude: one core of a server's processor (fp32, AVX2); an accelerator of the A100's class
# (bf16), of which matrix products reach half the peak.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "cpu": Device(flops_per_s=5e10, bytes_per_s=1e10, kernel_s=5e-6),
        "cuda": Device(flops_per_s=1.5e14, bytes_per_s=1.5e12, kernel_s=5e-6),
    }
)


# Device type -> tier -> how fast bytes get there or back: for "cuda", pinned memory over PCIe 4 with 16 lanes, and one
# solid-state disk; for "cpu", a copy in memory, and such a disk.
TIERS: Mapping[str, Mapping[str, Link]] = MappingProxyType(
    {
        "cpu": MappingProxyType({"host": Link(5e-6, 5e9), "disk": Link(1e-4, 1e9)}),
        "cuda": MappingProxyType({"host": Link(1e-5, 2.2e10), "disk": Link(1e-4, 2e9)}),
    }
)


@dataclass(frozen=True)
class Gpu:
    """A GPU that code can be generated for without having it.

    Attributes:
        name: As its maker calls it.
        device: How fast it is.
        multiprocessors: How many it has.
        shared_bytes: Shared memory that one block may use, at most.
        l2_bytes: Its second cache.
        memory_bytes: Its memory.
    """

    name: str
    device: Device
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int


def _of_peaks(tensor_core: float, bandwidth: float, **others: float) -> Device:
    """A device from the peaks of its data sheet, of which kernels reach a part: products 0.7, copies 0.85.

    Args:
        tensor_core: Dense bf16 and fp16 operations a second.
        bandwidth: Bytes a second of its memory.
        others: Dtype -> operations a second.
    """
    rates = tuple((dtype, 0.7 * rate) for dtype, rate in sorted(others.items()))
    return Device(0.7 * tensor_core, 0.85 * bandwidth, kernel_s=5e-6, of_dtype=rates)


# Triton's name of an architecture -> its usual GPU, by NVIDIA's data sheets (SXM; without sparsity, fp32 without TF32,
# which torch does not use unless told to).
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "sm_80": Gpu(
            "A100 80GB",
            _of_peaks(312e12, 2.039e12, float32=19.5e12, float64=19.5e12),
            multiprocessors=108,
            shared_bytes=163 * 1024,
            l2_bytes=40 * 2**20,
            memory_bytes=80 * 2**30,
        ),
        "sm_90": Gpu(
            "H100",
            _of_peaks(989e12, 3.35e12, float32=67e12, float64=67e12),
            multiprocessors=132,
            shared_bytes=227 * 1024,
            l2_bytes=50 * 2**20,
            memory_bytes=80 * 2**30,
        ),
    }
)

# Backend -> orders of magnitude: gloo between processes of one host, as two of them share 109 MB; NCCL over NVLink.
LINKS: Mapping[str, LinkTable] = MappingProxyType(
    {
        "gloo": LinkTable(
            Link(latency_s=1e-4, bytes_per_s=1e9),
            (
                ("all_gather_into_tensor", Link(latency_s=1e-4, bytes_per_s=4e8)),
                ("reduce_scatter_tensor", Link(latency_s=1e-4, bytes_per_s=3e8)),
            ),
        ),
        "nccl": LinkTable(Link(latency_s=1e-5, bytes_per_s=1e11)),
    }
)


def default_links(backend: str, *, device_type: str) -> LinkTable:
    """The links of `LINKS`; a backend that is not listed has what is usual on the device: on the CPU gloo's."""
    return LINKS.get(backend, LINKS["gloo" if device_type == "cpu" else "nccl"])
