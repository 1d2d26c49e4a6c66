"""The speed of devices and links: documented values, or measurements of `dsgraph calibrate`."""

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
        """Return the link itself: it is the same for every kind of collective."""
        return self

    def has(self, kind: str) -> bool:
        """Return False: there are no separate values for single kinds."""
        return False


@dataclass(frozen=True)
class LinkTable:
    """A connection that a backend uses better for some kinds of collectives than for others.

    Attributes:
        usual: The link for every kind that is not listed.
        kinds: Kind of collective (by `collective_kind`) and its link; each kind once.
    """

    usual: Link
    kinds: tuple[tuple[str, Link], ...] = ()

    def of(self, kind: str) -> Link:
        """Return the link for a kind of collective."""
        return next((link for name, link in self.kinds if name == kind), self.usual)

    def has(self, kind: str) -> bool:
        """Return whether there are separate values for this kind."""
        return any(name == kind for name, _ in self.kinds)


@dataclass(frozen=True)
class Device:
    """A device that computes.

    Attributes:
        flops_per_s: Floating-point operations per second of a large matrix product.
        bytes_per_s: Bytes per second that a large copy reads and writes.
        kernel_s: Seconds of an empty kernel.
        of_dtype: Name of a dtype (without `torch.`) and its operations per second, if they differ from `flops_per_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float
    of_dtype: tuple[tuple[str, float], ...] = ()

    def rate(self, dtype: torch.dtype | None) -> float:
        """Return the floating-point operations per second for a dtype; None means an unknown dtype."""
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
        name: Its product name.
        device: Its speed.
        multiprocessors: Number of multiprocessors.
        shared_bytes: Largest shared memory of one block.
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
    """Return a device from the peaks of its data sheet; kernels reach a share of them: products 0.7, copies 0.85.

    Args:
        tensor_core: Dense bf16 and fp16 operations per second.
        bandwidth: Bytes per second of its memory.
        others: Dtype -> operations per second.
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
    """Return the links of `LINKS`; an unlisted backend gets the default of the device: gloo's on the CPU."""
    return LINKS.get(backend, LINKS["gloo" if device_type == "cpu" else "nccl"])
