"""Lowers a captured graph to Inductor's code for a device that this machine does not have, and to binaries.

A graph is traced and partitioned on the CPU, because autograd on fake CUDA tensors ends a process whose torch was built
without CUDA. Each graph that comes of it is then moved to `cuda:0`, as far as its metadata goes, and lowered within
`harness.fake_device`. No kernel runs and nothing is measured, so what Inductor decides by a measurement
(`max_autotune`, padding of matrix products) is left undone.

The internals of torch that this uses were checked on the versions in `harness.CHECKED`.
"""

from __future__ import annotations

import copy
import linecache
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from dsgraph.passes.compat import CustomGraphPass, FakeTensorMode, detect_fake_mode, storage_id
from dsgraph.passes.ir.graph import all_graph_modules

from .harness import defined_kernels
from .scheduled_kernels import Lowered, Recorder, read_lowered

_DEVICE = torch.device("cuda", 0)

# Settings of every lowering here: no measurements, no caches.
_SETTINGS: Mapping[str, Any] = {
    "compile_threads": 1,
    "force_disable_caches": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "cpp_wrapper": False,
    "cuda_backend": "triton",
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,
    "triton.unique_kernel_names": True,
}


@dataclass(frozen=True)
class Binary:
    """One configuration of a Triton kernel, compiled."""

    config: str
    warps: int
    shared_bytes: int
    ttir: str
    ptx: str
    cubin: bytes


Receive = Callable[[GraphModule, Sequence[Any], str], None]


def trace(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    each_joint: Callable[[GraphModule], None],
    receive: Receive,
) -> None:
    """Take a captured graph through Inductor up to the point where it would be lowered; nothing is compiled.

    Args:
        gm: The captured graph; taken over.
        inputs: Its inputs, on the CPU.
        patches: Inductor's configuration, as `dsgraph` sets it for the graph.
        each_joint: Called with each joint or inference graph before passes see it.
        receive: Called with each final graph, its fake inputs, and "forward", "backward" or "inference".
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    def compile_nothing(graph_module: GraphModule, fakes: Sequence[Any], **kwargs: Any) -> Any:
        inference = "inference" if kwargs.get("is_inference") else "forward"
        receive(graph_module, fakes, "backward" if kwargs.get("is_backward") else inference)

        def refuse(_: list[Any]) -> Any:
            raise AssertionError("a graph that was traced for a device that is not there cannot run")

        refuse._boxed_call = True  # type: ignore[attr-defined]
        return refuse

    before = _Before(each_joint, patches.get("joint_custom_post_pass"))
    settings = {**patches, **_SETTINGS, "joint_custom_post_pass": before}
    with functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        compile_fx(gm, inputs, inner_compile=compile_nothing, config_patches=settings)


class _Before(CustomGraphPass):
    """Does something to a joint or inference graph before the pass that Inductor is to run."""

    def __init__(self, first: Callable[[GraphModule], None], then: Callable[[Graph], None] | None) -> None:
        self._first, self._then = first, then

    def __call__(self, graph: Graph) -> None:
        if graph.owning_module is not None:
            self._first(graph.owning_module)
        if self._then is not None:
            self._then(graph)

    def uuid(self) -> object | None:
        return None


def retarget(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """Return a copy of a traced graph, and fake inputs for it, on the simulated device.

    Everything of the graph moves, also what a program would leave on the CPU. The graph's constants become inputs. Call
    it within `fake_device`.
    """
    from torch._inductor.compile_fx import fake_tensor_prop, view_to_reshape
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    with unset_fake_temporarily():
        moved = copy.deepcopy(gm)
        constants = _take_out_constants(moved)
    with mode, torch.no_grad():
        given = [
            mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in (*inputs, *constants)
        ]
        view_to_reshape(moved)
        # Still on the CPU: a composite op would ask for the device's guard, which a torch without CUDA has not.
        fake_tensor_prop(moved, given)
        nodes = [node for module in all_graph_modules(moved) for node in module.graph.nodes]
        move = _Mover([*given, *(node.meta.get("val") for node in nodes)])
        for node in nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _move_device)
            if "val" in node.meta:
                node.meta = {**node.meta, "val": tree_map(move, node.meta["val"])}
        for module in all_graph_modules(moved):
            module.recompile()
        return moved, tree_map(move, given)


def _move_device(value: Any) -> Any:
    return _DEVICE if isinstance(value, torch.device) and value.type == "cpu" else value


class _Mover:
    """Makes fake tensors of the device, one for each of the CPU; what shared memory there shares it again."""

    def __init__(self, values: Any) -> None:
        tensors = {id(value): value for value in tree_leaves(values) if isinstance(value, torch.Tensor)}
        self._tensors = tensors  # kept alive: ids are of use no longer than that
        self._sharing = Counter(map(storage_id, tensors.values()))
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if id(value) not in self._moved:
            self._moved[id(value)] = self._move(value)
        return self._moved[id(value)]

    def _move(self, value: torch.Tensor) -> torch.Tensor:
        shape, strides, dtype = value.shape, value.stride(), value.dtype
        if self._sharing[storage_id(value)] == 1:
            return torch.empty_strided(shape, strides, dtype=dtype, device=_DEVICE)
        key = (storage_id(value), dtype)
        if key not in self._memory:
            count = value.untyped_storage().nbytes() // value.element_size()
            self._memory[key] = torch.empty(count, dtype=dtype, device=_DEVICE)
        return self._memory[key].as_strided(shape, strides, value.storage_offset())


def _take_out_constants(gm: GraphModule) -> list[torch.Tensor]:
    """Turn a graph's 0-dimensional constants into numbers and the others into inputs; return the latter."""
    *_, last = [None, *gm.graph.find_nodes(op="placeholder")]
    taken: list[torch.Tensor] = []
    for node in gm.graph.find_nodes(op="get_attr"):
        value: Any = reduce(getattr, str(node.target).split("."), cast("Any", gm))
        if not isinstance(value, torch.Tensor):
            continue
        before = last.next if last is not None else next(iter(gm.graph.nodes))
        with gm.graph.inserting_before(before):
            if value.dim() == 0:
                full = torch.ops.aten.full.default
                instead = gm.graph.call_function(
                    full, ([], value.item()), {"dtype": value.dtype, "device": value.device}
                )
            else:
                instead = last = gm.graph.placeholder(f"constant_{node.name}")
                taken.append(value)
        instead.meta = dict(node.meta)
        node.replace_all_uses_with(instead)
        gm.graph.erase_node(node)
    return taken


def lower(gm: GraphModule, inputs: Sequence[Any], *, phase: str, patches: Mapping[str, Any]) -> Lowered:
    """Return Inductor's code for a retargeted graph. Call it within `fake_device`.

    Args:
        gm: From `retarget`; taken over.
        inputs: Likewise.
        phase: "forward", "backward" or "inference".
        patches: Inductor's configuration, as for `trace`.
    """
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode: Any = detect_fake_mode(inputs)
    is_inference = phase == "inference"
    recorder = Recorder()
    hooks = {"custom_partitioner_fn": None, "joint_custom_post_pass": None}
    with (
        config.patch({**patches, **hooks, **_SETTINGS}),
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        V.set_debug_handler(DebugContext()),
        defined_kernels(recorder.define),
    ):
        compile_fx._recursive_record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
        lowering = GraphLowering(
            gm,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_backward=phase == "backward",
            is_inference=is_inference,
        )
        lowering.freeze_runtime_asserts()
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code = lowering.codegen()[0].value
            return read_lowered(code, recorder, lowering.scheduler.nodes, list(gm.graph.nodes))


def compile_module(source: str, name: str, *, path: Path) -> list[Binary]:
    """Compile a Triton kernel of Inductor's code, in each configuration that it would try. Within `fake_device`.

    Args:
        source: The kernel's module.
        name: What the module calls it.
        path: Where the module will lie, for debug information. What lies there now is not read.
    """
    import torch._inductor.config as config

    module = ModuleType(name)
    module.__file__ = str(path)
    # Triton asks `inspect` for the source of a function. An entry without a time is not compared with the file.
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    exec(compile(source, path, "exec"), module.__dict__)
    autotuner = getattr(module, name)
    with config.patch(use_static_triton_launcher=False):
        autotuner.precompile(warm_cache_only=True)
    return [_binary(result) for result in autotuner.compile_results]


def _binary(result: Any) -> Binary:
    kernel = result.kernel
    chosen = ", ".join(f"{name}={value}" for name, value in sorted(result.config.kwargs.items()))
    return Binary(
        chosen,
        kernel.metadata.num_warps,
        kernel.metadata.shared,
        kernel.asm["ttir"],
        kernel.asm["ptx"],
        kernel.asm["cubin"],
    )
