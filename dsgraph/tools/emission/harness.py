"""Simulates an NVIDIA device for torch and Triton, and process groups with ranks that do not exist.

Each function here is a context manager that restores everything at its end, also after an exception; nothing else in
dsgraph replaces functions of torch. The replacements were checked on the versions in `CHECKED`; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dsgraph.passes.analysis.hardware import GPUS
from dsgraph.utils.errors import EmissionError

# Package -> prefixes of its versions with which this package was tested.
CHECKED: Mapping[str, tuple[str, ...]] = {"torch": ("2.13.",), "triton": ("3.9.",)}


def check_versions(torch_version: str, triton_version: str) -> None:
    """Refuse versions whose internals this package does not know.

    Raises:
        EmissionError: A version is not among `CHECKED`.
    """
    for package, found in (("torch", torch_version), ("triton", triton_version)):
        if not found.startswith(CHECKED[package]):
            known = ", ".join(f"{version}*" for version in CHECKED[package])
            raise EmissionError(
                f"emitting kernels without a GPU takes internals of {package} that were checked on {known} alone, and "
                f"this is {package} {found}: install one of these, or run on a GPU"
            )


@contextmanager
def fake_device(arch: str) -> Iterator[None]:
    """Simulate a GPU of this architecture for torch's Python code and Triton, and for nothing else.

    Everything is as it was afterwards, also when an exception leaves it.

    Args:
        arch: One of `GPUS`.

    Raises:
        EmissionError: This torch or Triton was not checked.
    """
    import torch._dynamo.device_interface as interfaces
    import triton

    check_versions(torch.__version__, triton.__version__)
    capability = _capability(arch)
    properties = _properties(arch, capability)
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
    }
    interfaces.get_registered_device_interfaces()  # which registers the usual ones
    with ExitStack() as undo:
        undo.callback(_forget_devices)
        for name, stand_in in stand_ins.items():
            undo.enter_context(_replaced(torch.cuda, name, stand_in))
        undo.enter_context(_replaced(torch.version, "cuda", "12.8"))
        interface = _interface(interfaces.CudaInterface, stand_ins)
        undo.enter_context(_kept(interfaces.device_interfaces))
        interfaces.device_interfaces |= {"cuda": interface, "cuda:0": interface}
        undo.enter_context(fake_driver(arch))
        undo.enter_context(_WithoutGuards())
        _forget_devices()
        yield


@contextmanager
def fake_driver(arch: str) -> Iterator[None]:
    """Let Triton compile for this architecture; torch does not know of it.

    Args:
        arch: One of `GPUS`.
    """
    import triton

    with _replaced(triton.runtime.driver, "_active", _driver(_capability(arch))):
        yield


def _capability(arch: str) -> tuple[int, int]:
    """Return `sm_90` -> 9, 0."""
    return int(arch[3:-1]), int(arch[-1])


class _WithoutGuards(TorchFunctionMode):
    """Some functions of tensors (`copy_`, `~`, indexing) first switch to the tensor's device, which is not there.

    Those are called once more with fake tensors of the CPU in place of the device's.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if _NO_GUARD not in str(error):
                raise
        on_cpu, options = tree_map(partial(_stand_in, of="cuda", on="cpu"), (args, kwargs))
        result = func(*on_cpu, **options)
        if on_cpu and result is on_cpu[0]:  # it wrote to its first argument
            return args[0]
        return tree_map(partial(_stand_in, of="cpu", on="cuda:0"), result)


# Torch's message if it was built without the device whose guard it needs.
_NO_GUARD = "PyTorch is not linked with support for cuda devices"


def _stand_in(value: Any, *, of: str, on: str) -> Any:
    """Return a (fake) tensor like another, on another device."""
    if not isinstance(value, torch.Tensor) or value.device.type != of:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=on)


@contextmanager
def defined_kernels(record: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call `record` for each Triton kernel that Inductor defines for CUDA devices.

    Args:
        record: Called with its name, the scheduler's nodes that it computes, and Inductor's object for it.
    """
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
    from torch._inductor.codegen.triton import TritonScheduling

    class RecordingTriton(TritonScheduling):
        def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
            name: str = super().define_kernel(src_code, node_schedule, kernel)
            record(name, node_schedule, kernel)
            return name

    class RecordingCombined(CUDACombinedScheduling):
        def __init__(self, scheduler: Any) -> None:
            super().__init__(scheduler)
            self._triton_scheduling = RecordingTriton(scheduler)

    common.init_backend_registration()
    usual = common.device_codegens["cuda"]
    common.device_codegens["cuda"] = common.DeviceCodegen(
        RecordingCombined,
        usual.wrapper_codegen,
        usual.cpp_wrapper_codegen,
        usual.fx_wrapper_codegen,
    )
    try:
        yield
    finally:
        common.device_codegens["cuda"] = usual


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """Make every process group, whatever its backend, one of `world` ranks of which this is the first.

    The others do not exist: collectives return at once, and what they return is of no use.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    usual = dist.init_process_group

    def join(*_: object, **__: object) -> None:
        usual("fake", store=FakeStore(), rank=0, world_size=world)

    with _replaced(dist, "init_process_group", join), _replaced(dist.distributed_c10d, "init_process_group", join):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def has_kernel(op: Any, device: str) -> bool:
    """Return whether an op can run on a kind of device: "CPU" or "CUDA".

    The CUDA kernels of torch itself are unknown where torch was built without CUDA.
    """
    keys = (device, "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def _properties(arch: str, capability: tuple[int, int]) -> SimpleNamespace:
    """Return the device properties, as `torch.cuda.get_device_properties` would."""
    gpu = GPUS[arch]
    return SimpleNamespace(
        type="cuda",
        name=f"NVIDIA {gpu.name}",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=gpu.memory_bytes,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=gpu.shared_bytes,
        L2_cache_size=gpu.l2_bytes,
        gcnArchName="",
    )


def _interface(usual: type[Any], stand_ins: Mapping[str, Callable[..., Any]]) -> type[Any]:
    """Return the interface by which Dynamo and Inductor query CUDA, answered without CUDA."""

    class Device:
        def __init__(self, device: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class Worker(usual.Worker):  # type: ignore[name-defined]
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(stand_ins["current_device"])
        get_device_properties = staticmethod(stand_ins["get_device_properties"])

    nothing = dict.fromkeys(("set_device", "synchronize"), staticmethod(lambda device=None: None))
    first = dict.fromkeys(("exchange_device", "maybe_exchange_device", "get_raw_stream"), staticmethod(lambda _=0: 0))
    answers = {name: staticmethod(stand_in) for name, stand_in in stand_ins.items()}
    return type("AbsentCuda", (usual,), {"Worker": Worker, "device": Device, **nothing, **first, **answers})


def _driver(capability: tuple[int, int]) -> Any:
    """Return a driver for Triton that only knows what it compiles for."""
    import triton
    from triton.backends.compiler import GPUTarget

    class AbsentDriver(triton.backends.backends["nvidia"].driver):  # type: ignore[misc]
        def __init__(self) -> None: ...  # the usual one loads libcuda

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return capability

    return AbsentDriver()


def _forget_devices() -> None:
    """Empty the caches in which torch remembers what devices there are, and what they can do."""
    import torch._inductor.comm_analysis
    import torch._inductor.runtime.hints
    import torch._inductor.utils
    import torch.utils._triton

    modules = (torch._inductor.utils, torch._inductor.comm_analysis, torch.utils._triton)
    kind = type(lru_cache(lambda: None))
    for function in (value for module in modules for value in vars(module).values()):
        if isinstance(function, kind):
            function.cache_clear()
    torch._inductor.runtime.hints.DeviceProperties.create.cache_clear()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _kept(mapping: dict[Any, Any]) -> Iterator[None]:
    """Restore a dictionary's entries at the end."""
    before = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(before)
