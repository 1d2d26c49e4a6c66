"""Every private torch API that the product uses, in one place.

Checked on torch 2.11.0, 2.12.1 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from types import CodeType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx import GraphModule, Node

MINIMUM_TORCH = (2, 11)
UNSUPPORTED_TORCH = (2, 14)

# What runs while a module is being called; its local `self` is the module.
MODULE_CALL = torch.nn.Module._call_impl.__code__


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuses a torch that dsgraph was not checked on.

    Raises:
        ImportError: `version` is outside the supported range.
    """
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not MINIMUM_TORCH <= found < UNSUPPORTED_TORCH:
        low, high = (".".join(map(str, bound)) for bound in (MINIMUM_TORCH, UNSUPPORTED_TORCH))
        raise ImportError(
            f'dsgraph needs torch >={low},<{high} and found {version}: pip install "torch>={low},<{high}"'
        )


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree`, of which each tensor is replaced; torch knows lists, dicts and what it was told of."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, function, tree)


def profiler_runs() -> bool:
    """Whether a profiler of torch is at work in this process."""
    return bool(torch._C._autograd._profiler_enabled())


def default_store() -> dist.Store:
    """The store through which the default process group met."""
    return dist.distributed_c10d._get_default_store()


def own_store() -> dist.Store:
    """The default store, on a connection of one's own: to wait there keeps nobody else from it."""
    clone: dist.Store = default_store().clone()  # type: ignore[attr-defined]  # which torch's stubs lack
    return clone


def store_is_a_file() -> bool:
    """Whether the ranks met in a file."""
    store: Any = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """How long a collective of `group` may take before it fails."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.distributed_c10d.default_pg_timeout


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists and dicts, and how they are nested, which compares and prints."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def unflatten_tree(leaves: list[Any], spec: Any) -> Any:
    """What `flatten_tree` took apart, with other leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def device_and_dtype(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and dtype that the arguments of `nn.Module.to` name; None for those not named."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def not_capturable() -> type[Exception]:
    """What Dynamo raises where a whole graph is asked for and there is none."""
    return torch._dynamo.exc.Unsupported


def ignoring_log_messages() -> Any:
    """Return a context in which Dynamo captures code that logs, without the messages."""
    emits = ("debug", "info", "warning", "error", "critical", "exception", "log")
    functions = {function for name, function in vars(logging.Logger).items() if name.startswith(emits)}
    known: set[Any] = torch._dynamo.config.ignore_logging_functions
    return torch._dynamo.config.patch(ignore_logging_functions=known | functions)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the running backward has accumulated all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def running_backward() -> int:
    """A number of the backward that runs; another one for each, -1 outside."""
    return torch._C._current_graph_task_id()


def is_compiled_backward(node: Any) -> bool:
    """Return True for the autograd node that AOTAutograd makes of a compiled graph's backward."""
    return type(node).__name__ == "CompiledFunctionBackward"


def accumulates(leaf: Any) -> bool:
    """Whether the running backward adds a gradient to the `.grad` of a leaf, of which this is the autograd node."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # `torch.autograd.grad` hands it to its caller
        return False


def autograd_node(leaf: torch.Tensor) -> Any:
    """The node that adds gradients to the `.grad` of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def distributed_like(like: DTensor, local: torch.Tensor) -> DTensor:
    """This rank's part of a tensor that is laid out as another.

    `DTensor.from_local` would bring it to the device of the mesh; what is offloaded to the host is not there, as with
    FSDP's `CPUOffloadPolicy`, which makes its parameters so.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def keeping_version(tensors: tuple[torch.Tensor, ...]) -> Any:
    """Context in which writes to `tensors` do not invalidate what autograd saved of them."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)


def version_of(tensor: torch.Tensor) -> int:
    """A number that every write to `tensor`, in place, raises."""
    return tensor._version


def apply_to_tensors(
    kind: type[torch.nn.Module], module: torch.nn.Module, change: Callable[..., Any], recurse: bool = True
) -> torch.nn.Module:
    """What `module.to`, `.double` and their like call, as class `kind` has it.

    Where nothing changes, such as on the device where all is, nothing is done: torch would swap each `DTensor` even so,
    and could not once a compiled graph knows it.
    """
    own = [value for value in (*module._parameters.values(), *module._buffers.values()) if value is not None]
    with torch.no_grad():
        is_same = kind._apply is torch.nn.Module._apply and all(change(value) is value for value in own)
    if not is_same:
        return kind._apply(module, change, recurse)
    for child in module.children() if recurse else ():
        child._apply(change)
    return module


def save_own_state(
    kind: type[torch.nn.Module], module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """Save a module's own state as class `kind` does; `state_dict` calls this for each module."""
    kind._save_to_state_dict(module, state_dict, prefix, keep_vars)


def identity_of_parts(param: DTensor) -> tuple[int, int]:
    """What tells the memory of a `DTensor` itself, and its local tensor, from others."""
    return param.untyped_storage()._cdata, id(param._local_tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, as while torch traces."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def in_transform() -> bool:
    """Whether a transform of `torch.func` (`vmap`, `grad`, ...) is running; Dynamo knows the answer, too."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # which Dynamo reads as a constant, with a guard


def outside_transforms() -> Any:
    """Context in which no transform of `torch.func` is running; what it computes is a constant to all of them."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def without_transforms(tensor: Any) -> Any:
    """The tensor that transforms of `torch.func` map over or differentiate with respect to; `tensor` if none does."""
    while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def outside_selective_checkpoints() -> Iterator[None]:
    """Hide the ops of a `with` block from selective checkpoints, in the forward and in its recomputation."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    checkpoints = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    modes = _get_current_dispatch_mode_stack()
    if not any(isinstance(mode, checkpoints) for mode in modes):
        yield
        return
    for _ in modes:
        _pop_mode()
    others = [mode for mode in modes if not isinstance(mode, checkpoints)]
    try:
        for mode in others:
            _push_mode(mode)
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def has_hooks(param: torch.Tensor) -> bool:
    """Whether something is called when a gradient of `param` is computed or added up."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Return a module's pre-hooks of `load_state_dict` and forward, and which of the latter take keywords."""
    return module._load_state_dict_pre_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs


def is_tracing() -> bool:
    """Whether Dynamo is compiling something, and may be looking at the tensors that it was given."""
    return torch._guards.TracingContext.try_get() is not None


@torch.compiler.assume_constant_result
def compiling_backend() -> str:
    """The name of the backend for which Dynamo is tracing what calls this; empty outside Dynamo."""
    output = _dynamo_output()
    return "" if output is None else getattr(output.compiler_fn, "__name__", "")


def _dynamo_output() -> Any:
    """Return what Dynamo is tracing; None outside Dynamo, as in `torch.export` of an uncompiled model."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:  # a property of a module that raises it would be taken for missing
        return None


# Dynamo captures the functions that these operators call; ranks may run them different numbers of times.
_CONTROL_FLOW = frozenset({"cond", "while_loop", "map", "map_impl", "scan", "associative_scan"})


@torch.compiler.assume_constant_result
def leave_control_flow() -> bool:
    """Make Dynamo capture the following code before the outermost enclosing control flow; True if there is any.

    Its results become arguments of the operator (`torch.cond`, `while_loop`, ...), like any value from outside.
    """
    output = _dynamo_output()
    if output is None:
        return False
    outer, tracer = None, output.current_tracer
    while tracer.parent is not None:
        if getattr(tracer.source_target, "__name__", "") in _CONTROL_FLOW:
            outer = tracer.parent
        tracer = tracer.parent
    if outer is not None:
        output.tracers.append(outer)
    return outer is not None


@torch.compiler.assume_constant_result
def return_to_control_flow() -> bool:
    """Return to the control flow that `leave_control_flow` left."""
    _dynamo_output().tracers.pop()
    return True


def without_overrides(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of torch as if subclasses of tensors among its arguments were plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


NO_OVERRIDES = torch._C._disabled_torch_function_impl
"""What a subclass of tensors that computes as a plain tensor has for `__torch_function__`, as `nn.Parameter` does."""


def keep_static(tensor: torch.Tensor) -> None:
    """Tells Dynamo that no size of `tensor` ever changes, even where everything else is dynamic."""
    torch._dynamo.mark_static(tensor)


def is_compiled(model: object) -> bool:
    """Whether `model` is what `torch.compile(module)` returns."""
    return isinstance(model, torch._dynamo.OptimizedModule)


def unwrap_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` was given, where `model` is what it returned; else `model`."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


def compiled_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules inside `model` that are compiled for themselves: by `torch.compile(m)` or by `m.compile()`."""
    found = []
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule):
            found.append(unwrap_compiled(module))
        elif module._compiled_call_impl is not None:
            found.append(module)
    return found


def break_graph() -> None:
    """Ends the graph that Dynamo captures; what follows runs uncompiled up to the next frame."""
    torch._dynamo.graph_break()


def only_inlined(function: Callable[..., Any]) -> None:
    """Keeps Dynamo from compiling calls of `function` by themselves; inside a bigger frame it is inlined as ever."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def past_dynamo(error: Exception) -> Exception:
    """Return a dsgraph error in a form that Dynamo raises unchanged instead of wrapping it.

    Dynamo wraps a backend's error in `BackendCompilerFailed`, unless it is one of its own classes. The result is of a
    subclass of both: `except dsgraph.OptionError` catches it, and its text is the error's own.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind, words = type(error), str(error)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    methods: dict[str, Any] = {
        "__init__": lambda self: ShortenTraceback.__init__(self, words, first_useful_frame=None),
        "__str__": lambda _: words,
        "__reduce__": lambda _: (kind, (words,)),  # it is pickled as the plain error
    }
    made = type(kind.__name__, (kind, ShortenTraceback), body | methods)()
    vars(made).update(vars(error))
    return cast("Exception", made.with_traceback(error.__traceback__))


def source_name(placeholder: Node) -> str:
    """Where Dynamo found a graph input, as an expression over the compiled frame's locals."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def active_ddp() -> bool:
    """Whether the frame being compiled runs inside DistributedDataParallel, which averages gradients itself."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def compile_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], *, patches: dict[str, Any], cache_tag: str, anew: bool
) -> Callable[..., Any]:
    """AOTAutograd and Inductor, with configuration patches that hold for the backward, too.

    With `anew` AOTAutograd's cache is not asked, so that all passes run.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    config: Any = torch.compiler.config

    @functools.wraps(compile_fx_inner)
    def compile_tagged(*args: Any, **kwargs: Any) -> Any:
        # The backward may be compiled long after this function is left.
        with config.patch(cache_key_tag=cache_tag), _without_donations(args[0]):
            return compile_fx_inner(*args, **kwargs)

    cached = functorch_config.patch(enable_autograd_cache=False) if anew else contextlib.nullcontext()
    with config.patch(cache_key_tag=cache_tag), cached:
        compiled: Any = compile_fx(gm, inputs, inner_compile=compile_tagged, config_patches=patches or None)
    return cast("Callable[..., Any]", compiled)


@contextlib.contextmanager
def _without_donations(gm: GraphModule) -> Iterator[None]:
    """Keeps Inductor from writing over inputs of a backward that calls other graphs.

    It looks up by number which inputs of the backward nobody else reads, and takes the inputs of the called graphs for
    those of the same numbers (2.13.0, read in `GraphLowering.placeholder`).
    """
    context = torch._guards.TracingContext.try_get()
    known: Any = context.fw_metadata if context is not None else None
    if known is None or not gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        yield
        return
    donated, known.bw_donated_idxs = known.bw_donated_idxs, None
    try:
        yield
    finally:
        known.bw_donated_idxs = donated


def compile_with_aot(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
    partition_fn: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd with a compiler of our own for the forward and the backward graph."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=inference_compiler, partition_fn=partition_fn)
    return backend(gm, inputs)


def boxed(gm: GraphModule) -> Callable[..., Any]:
    """`gm` as AOTAutograd calls it: one list of inputs, each freed after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return gm.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def default_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The relative and the absolute tolerance of `torch.testing.assert_close`."""
    from torch.testing._comparison import default_tolerances

    rtol, atol = default_tolerances(dtype)
    return rtol, atol


def inductor_mode(mode: str) -> dict[str, Any]:
    """Inductor's configuration for a `torch.compile` mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def uses_cudagraphs(settings: Mapping[str, Any]) -> bool:
    """Whether Inductor replays graphs of kernels that it recorded, given what is set besides its configuration."""
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


def inductor_settings() -> list[str]:
    """The names of Inductor's configuration; those of nested settings have a dot."""
    from torch._inductor import config

    return list(config.get_config_copy())


def register_backend(compiler: Callable[..., Any], name: str) -> None:
    """Makes `torch.compile(backend=name)` find `compiler` where no installed entry point does.

    With an entry point torch registers the backend itself, right after importing this package, and insists on being
    the only one to do so.
    """
    from torch._dynamo.backends import registry

    if not entry_points(group="torch_dynamo_backends", name=name) and name not in registry._COMPILER_FNS:
        registry.register_backend(compiler, name=name)


def backend_named(name: str) -> Callable[..., Any]:
    """The backend that `torch.compile(backend=name)` would use."""
    from torch._dynamo.backends import registry

    return cast("Callable[..., Any]", registry.lookup_backend(name))


@dataclass(frozen=True)
class TracedFrame:
    """The frame of which Dynamo is compiling a graph.

    Attributes:
        code: The user's function, also where the frame is what follows a graph break in it.
        name: The frame's own name; it holds the line of the graph break where the frame is what follows one.
        receiver: Its local `self`, if it has one.
        compile_id: Dynamo's name for this compile, such as "0/1".
        times: How often Dynamo has compiled the frame, this time included: for this call of `torch.compile`, where that
            counts for itself (`isolated`), or for all.
        recompile_reason: The guard that failed; empty at the first compile.
    """

    code: CodeType
    name: str
    receiver: object
    compile_id: str
    times: int
    recompile_reason: str


def traced_frame() -> TracedFrame | None:
    """What Dynamo is compiling right now; None when the backend was called by something else."""
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None
    if compile_id is None:
        return None
    resumed = ContinueExecutionCache.generated_code_metadata.get(frame.f_code)
    return TracedFrame(
        code=frame.f_code if resumed is None else resumed.code,
        name=frame.f_code.co_name,
        receiver=frame.f_locals.get("self"),
        compile_id=str(compile_id),
        times=_isolated_compiles(frame.f_code) or (compile_id.frame_compile_id or 0) + 1,
        recompile_reason=get_metrics_context()._metrics.get("recompile_reason") or "",
    )


def graph_break(gm: GraphModule) -> tuple[str, list[tuple[str, int, str]]] | None:
    """Why a captured graph ends before its function does, and where: file, line, function, outermost first."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), [(frame.filename, frame.lineno or 0, frame.name) for frame in reason.user_stack]


def compile_metrics() -> list[Any]:
    """Dynamo's own record of each frame that it compiled or gave up on; it keeps the last 64."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def activation_memory_budget() -> float:
    """Return the share of activations that torch's own partitioner may save; 1.0 unless somebody has set it."""
    from torch._functorch import config as functorch_config

    return float(functorch_config.activation_memory_budget)


def is_marked_with_maximum(tensor: torch.Tensor) -> bool:
    """Return True if `torch._dynamo.mark_dynamic` was given a maximum for one of a tensor's dimensions."""
    return any(marked.max is not None for marked in getattr(tensor, "_dynamo_dynamic_range", ()))


def recompile_limit() -> int:
    """How often Dynamo compiles a function before it runs it uncompiled."""
    return int(torch._dynamo.config.recompile_limit)


def _isolated_compiles(code: CodeType) -> int:
    """How often `code` is compiled for the running call of `torch.compile`, this time included; 0 if it counts all."""
    if not isolated():
        return 0
    from torch._dynamo.convert_frame import _get_cache_entries_for_region, get_eval_frame_isolate_recompiles_id

    region = get_eval_frame_isolate_recompiles_id()
    return len(_get_cache_entries_for_region(code, region)) + 1 if region >= 0 else 0


def isolated() -> dict[str, bool]:
    """Arguments with which a call of `torch.compile` counts its own recompiles alone; none before torch 2.13."""
    knows = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if knows else {}


def allowing_recompiles(functions: int = 256) -> Any:
    """Within it Dynamo compiles a function as often as that: one for each bucket and batch size of each engine."""
    return torch._dynamo.config.patch(recompile_limit=functions, accumulated_recompile_limit=4 * functions)


def autograd_cache_hits() -> int:
    """How many compiles AOTAutograd has taken from its cache in this process."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


def runs_as_it_is(op: Any) -> bool:
    """Whether Inductor calls an op as it is, because it has no lowering of it."""
    from torch._inductor.lowering import fallbacks, lowerings

    return op not in lowerings or op in fallbacks


def strided_shard(dim: int, parts: int) -> Placement:
    """The placement of a tensor of which a dimension is made of `parts` equal pieces, each of them split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def new_fake_mode() -> Any:
    """A mode under which tensors have shapes and no memory, and in which plain tensors may appear."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
