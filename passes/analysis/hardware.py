"""The speed of devices and links: documented values, or measurements of `dsgraph calibrate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from dsgraph.passes.ir import collectives


@dataclass(frozen=True)
class Link:
    """A connection between ranks: a message of n bytes takes `latency_s + n / bytes_per_s` (the alpha-beta model).

    Attributes:
        latency_s: Seconds of an empty message.
        bytes_per_s: Bytes per second.
        delay: Seconds by which a second of messages delays what the device computes: on a CPU, gloo takes its cores.
    """

    latency_s: float
    bytes_per_s: float
    delay: float = 0.0

    trees: ClassVar[bool] = False

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
        trees: True if the backend sums over trees, not over a ring, see `collective_steps`.
    """

    usual: Link
    kinds: tuple[tuple[str, Link], ...] = ()
    trees: bool = False

    def of(self, kind: str) -> Link:
        """Return the link for a kind of collective.

        Raises:
            KeyError: No collective has this name.
        """
        known = collectives.TABLE.by_kind
        if kind not in known:
            raise KeyError(f"no collective is called {kind!r}: use a key of `TABLE.by_kind` ({', '.join(known)})")
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


# PCIe generation -> pinned memory over 16 lanes, which reach 0.7 to 0.8 of 16, 32 and 63 GB/s.
_PCIE: Mapping[int, Link] = MappingProxyType({3: Link(1e-5, 1.2e10), 4: Link(1e-5, 2.2e10), 5: Link(1e-5, 5e10)})

# Device type -> orders of magnitude, for devices whose product is not in `PRODUCTS`: one core of a server's processor
# (fp32, AVX2); an accelerator of the A100's class (bf16), of which matrix products reach half the peak.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "cpu": Device(flops_per_s=5e10, bytes_per_s=1e10, kernel_s=5e-6),
        "cuda": Device(flops_per_s=1.5e14, bytes_per_s=1.5e12, kernel_s=5e-6),
    }
)


# Device type -> tier -> how fast bytes get there or back: for "cuda", the host and one solid-state disk; for "cpu", a
# copy in memory, and such a disk.
TIERS: Mapping[str, Mapping[str, Link]] = MappingProxyType(
    {
        "cpu": MappingProxyType({"host": Link(5e-6, 5e9), "disk": Link(1e-4, 1e9)}),
        "cuda": MappingProxyType({"host": _PCIE[4], "disk": Link(1e-4, 2e9)}),
    }
)


def _of_peaks(tensor_core: float, bandwidth: float, **others: float) -> Device:
    """Return a device from the peaks of its data sheet; kernels reach a share of them: products 0.7, copies 0.85.

    Args:
        tensor_core: Dense bf16 and fp16 operations per second.
        bandwidth: Bytes per second of its memory.
        others: Dtype -> operations per second.
    """
    rates = tuple((dtype, 0.7 * rate) for dtype, rate in sorted(others.items()))
    return Device(0.7 * tensor_core, 0.85 * bandwidth, kernel_s=5e-6, of_dtype=rates)


@dataclass(frozen=True)
class Product:
    """The figures of a GPU's data sheet.

    Attributes:
        device: Its speed.
        host: Its link to the host.
    """

    device: Device
    host: Link

    @property
    def tiers(self) -> Mapping[str, Link]:
        """Tier -> the link to it; the disk is the default one."""
        return MappingProxyType({**TIERS["cuda"], "host": self.host})


# Part of the name that CUDA reports -> the product by NVIDIA's data sheet: peaks without sparsity; float32 without
# TF32, which torch does not use unless told to; float64 with tensor cores where they have it. `GPUS` refers to this
# table. `dsgraph plan`, which runs without torch, repeats the peaks (`dsgraph/parallel/planning/gpus.py`); a test
# compares them.
PRODUCTS: Mapping[str, Product] = MappingProxyType(
    {
        # "NVIDIA V100 Tensor Core GPU", 2020, SXM2. Its tensor cores take fp16 alone: bf16 runs as float32.
        "V100": Product(
            _of_peaks(125e12, 0.9e12, bfloat16=15.7e12, float32=15.7e12, float64=7.8e12),
            _PCIE[3],
        ),
        # "NVIDIA A100 Tensor Core GPU", 2021: 40 GB; 80 GB as SXM and as PCIe, whose memories differ.
        "A100": Product(_of_peaks(312e12, 1.555e12, float32=19.5e12, float64=19.5e12), _PCIE[4]),
        "A100-SXM4-80GB": Product(_of_peaks(312e12, 2.039e12, float32=19.5e12, float64=19.5e12), _PCIE[4]),
        "A100 80GB PCIe": Product(_of_peaks(312e12, 1.935e12, float32=19.5e12, float64=19.5e12), _PCIE[4]),
        # "NVIDIA H100 Tensor Core GPU", 2022 and 2023: SXM, and PCIe.
        "H100": Product(_of_peaks(989e12, 3.35e12, float32=67e12, float64=67e12), _PCIE[5]),
        "H100 PCIe": Product(_of_peaks(756e12, 2e12, float32=51e12, float64=51e12), _PCIE[5]),
        # "NVIDIA H200 Tensor Core GPU", 2024, SXM.
        "H200": Product(_of_peaks(989e12, 4.8e12, float32=67e12, float64=67e12), _PCIE[5]),
        # "NVIDIA Blackwell Architecture Technical Brief", 2024: HGX B200 at 1,000 W.
        "B200": Product(_of_peaks(2250e12, 8e12, float32=80e12, float64=40e12), _PCIE[5]),
        # "NVIDIA L4" and "NVIDIA L40S", 2023; "NVIDIA A10G" of AWS, 2021. Double precision: 1/64 of single precision,
        # by the table of throughputs in the CUDA C++ Programming Guide.
        "L4": Product(_of_peaks(121e12, 0.3e12, float32=30.3e12, float64=30.3e12 / 64), _PCIE[4]),
        "L40S": Product(_of_peaks(362e12, 0.864e12, float32=91.6e12, float64=91.6e12 / 64), _PCIE[4]),
        "A10G": Product(_of_peaks(70e12, 0.6e12, float32=35e12, float64=35e12 / 64), _PCIE[4]),
    }
)


def product_of(reported: str) -> str | None:
    """Return the longest name in `PRODUCTS` whose words stand in a reported name, such as "NVIDIA H100 80GB HBM3".

    None for an unknown product ("GH200" is no "H200"), and for a part of one (MIG), whose figures are smaller.
    """
    known = [name for name in PRODUCTS if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", reported)]
    return None if re.search(r"\bMIG\b", reported) else max(known, key=len, default=None)


def device_and_tiers(device_type: str, *, name: str = "") -> tuple[Device, Mapping[str, Link]]:
    """Return the speed of a device and its links to the tiers, by its data sheet.

    Args:
        device_type: "cpu", "cuda", ...; an unlisted type is taken for "cuda".
        name: Its name, as it reports it. Without a known product: `DEVICES` and `TIERS`.
    """
    product = product_of(name)
    if device_type == "cpu" or product is None:
        return DEVICES.get(device_type, DEVICES["cuda"]), TIERS.get(device_type, TIERS["cuda"])
    return PRODUCTS[product].device, PRODUCTS[product].tiers


@dataclass(frozen=True)
class Gpu:
    """A GPU that code can be generated for without having it.

    Attributes:
        name: Its product name.
        product: Its speed and its link to the host.
        multiprocessors: Number of multiprocessors.
        shared_bytes: Largest shared memory of one block.
        l2_bytes: Its second cache.
        memory_bytes: Its memory.
    """

    name: str
    product: Product
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int


# Triton's name of an architecture -> its usual GPU, by NVIDIA's data sheets (SXM).
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "sm_80": Gpu(
            "A100 80GB",
            PRODUCTS["A100-SXM4-80GB"],
            multiprocessors=108,
            shared_bytes=163 * 1024,
            l2_bytes=40 * 2**20,
            memory_bytes=80 * 2**30,
        ),
        "sm_90": Gpu(
            "H100",
            PRODUCTS["H100"],
            multiprocessors=132,
            shared_bytes=227 * 1024,
            l2_bytes=50 * 2**20,
            memory_bytes=80 * 2**30,
        ),
    }
)

# Backend -> orders of magnitude: gloo between processes of one host, as two of them share 109 MB; NCCL over NVLink.
# NCCL's latencies are about those by which it chooses algorithms itself (`src/graph/tuning.cc`, 2.30), for 8 GPUs a
# node: 15 us and 82 us for an all-reduce of 2 and 64 ranks over trees (LL128), 27 us and 150 to 300 us for an
# all-gather of 8 and 64. Gathers and reduce-scatters stay rings: PAT, from 2.23, needs a node for each GPU, and its
# latency has a linear part, too (2.8 us a rank).
LINKS: Mapping[str, LinkTable] = MappingProxyType(
    {
        "gloo": LinkTable(
            Link(latency_s=1e-4, bytes_per_s=1e9),
            (
                ("all_gather_into_tensor", Link(latency_s=1e-4, bytes_per_s=4e8)),
                ("reduce_scatter_tensor", Link(latency_s=1e-4, bytes_per_s=3e8)),
            ),
        ),
        "nccl": LinkTable(Link(3.5e-6, 1e11), (("all_reduce", Link(7e-6, 1e11)),), trees=True),
    }
)


def default_links(backend: str, *, device_type: str) -> LinkTable:
    """Return the links of `LINKS`; an unlisted backend gets the default of the device: gloo's on the CPU."""
    return LINKS.get(backend, LINKS["gloo" if device_type == "cpu" else "nccl"])
