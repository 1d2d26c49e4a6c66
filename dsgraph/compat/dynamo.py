"""Dynamo while it traces: the frame, control flow, graph breaks, errors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

LOSES_GRADIENTS_OF_WRITTEN_RESULTS = torch.__version__ < "2.12"
"""A captured `autograd.Function` gets zeros as its gradient if its forward returns a tensor that it writes to."""


def not_capturable() -> type[Exception]:
    """Return the error that Dynamo raises if `fullgraph=True` meets a graph break."""
    return torch._dynamo.exc.Unsupported


def capture_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Dynamo raises for a forward: graph breaks, wrong operands, values that are unknown."""
    errors = torch._dynamo.exc
    return errors.Unsupported, errors.TorchRuntimeError, errors.UserError


def ignoring_log_messages() -> Any:
    """Return a context in which Dynamo captures code that logs, without the messages."""
    emits = ("debug", "info", "warning", "error", "critical", "exception", "log")
    functions = {function for name, function in vars(logging.Logger).items() if name.startswith(emits)}
    known: set[Any] = torch._dynamo.config.ignore_logging_functions
    return torch._dynamo.config.patch(ignore_logging_functions=known | functions)


def is_tracing() -> bool:
    """Return True while Dynamo compiles something, and may read the tensors that it was given."""
    return torch._guards.TracingContext.try_get() is not None


@torch.compiler.assume_constant_result
def compiling_backend() -> str:
    """Return the name of the backend for which Dynamo traces the caller; empty outside Dynamo."""
    output = _dynamo_output()
    return "" if output is None else getattr(output.compiler_fn, "__name__", "")


def _dynamo_output() -> Any:
    """Return what Dynamo is tracing; None outside Dynamo, as in `torch.export` of an uncompiled model."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:  # a property of a module that raises it would be taken for missing
        return None


_CHECKPOINTS = frozenset({"wrap_activation_checkpoint", "tag_activation_checkpoint"})

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


@torch.compiler.assume_constant_result
def may_end_frame(*unless_options: str, in_checkpoint: bool = False) -> bool:
    """Return True if a graph that Dynamo captures for dsgraph may end here: it is neither whole nor inside an operator.

    Checkpoints are such operators: if a graph ends in one, torch runs it uncompiled, with all that it calls.

    Args:
        unless_options: Options of the backend that need one graph, if they are set to more than "auto" or "none".
        in_checkpoint: True asks about the graph around the enclosing checkpoints.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = _dynamo_output()
    if output is None or getattr(output.compiler_fn, "__name__", "") != "dsgraph":
        return False
    options = getattr(output.compiler_fn, "kwargs", {}).get("options") or {}
    if any(is_set(options, name) for name in unless_options):
        return False
    frame, tracer = InstructionTranslator.current_tx(), output.current_tracer
    if frame.one_graph or frame.error_on_graph_break:
        return False
    while in_checkpoint and getattr(tracer.source_target, "__name__", "") in _CHECKPOINTS:
        tracer = tracer.parent
    return tracer.parent is None


def is_set(options: Mapping[str, Any], name: str) -> bool:
    """Return True if an option of the backend is more than its default."""
    return options.get(name) not in (None, False, "auto", "none")


def options_of_calls() -> Mapping[str, Any]:
    """Return the options with which dsgraph compiles the functions that are called now; empty outside `torch.compile`.

    Also empty for another backend. It tells what follows before Dynamo traces it.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    compiler = get_eval_frame_callback()
    while compiler and getattr(compiler, "__name__", "") != "dsgraph":
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return getattr(compiler, "kwargs", {}).get("options") or {}


def keep_static(tensor: torch.Tensor) -> None:
    """Tell Dynamo that no size of `tensor` ever changes, even where everything else is dynamic."""
    torch._dynamo.mark_static(tensor)


def break_graph() -> None:
    """End the graph that Dynamo captures; the code after it runs uncompiled up to the next frame."""
    torch._dynamo.graph_break()


def only_inlined(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling calls of `function` on their own; inside a larger frame it is still inlined."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


only_inlined(options_of_calls)


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
    """Return where Dynamo found a graph input, as an expression over the compiled frame's locals."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def active_ddp() -> bool:
    """Return True inside DistributedDataParallel, which averages gradients itself."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


@dataclass(frozen=True)
class TracedFrame:
    """The frame of which Dynamo is compiling a graph.

    Attributes:
        code: The user's function, also where the frame is what follows a graph break in it.
        name: The frame's own name; it holds the line of the graph break where the frame is what follows one.
        receiver: Its local `self`, if it has one.
        compile_id: Dynamo's name for this compile, such as "0/1".
        times: Number of times that Dynamo has compiled the frame, this time included: for this call of `torch.compile`
            if it is counted separately (`isolated`), or for all.
        recompile_reason: The guard that failed; empty at the first compile.
    """

    code: CodeType
    name: str
    receiver: object
    compile_id: str
    times: int
    recompile_reason: str


def traced_frame() -> TracedFrame | None:
    """Return the frame that Dynamo compiles; None if something else called the backend."""
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
    """Return why and where a captured graph ends before its function: file, line, function, outermost first."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), [(frame.filename, frame.lineno or 0, frame.name) for frame in reason.user_stack]


def is_marked_with_maximum(tensor: torch.Tensor) -> bool:
    """Return True if `torch._dynamo.mark_dynamic` was given a maximum for one of a tensor's dimensions."""
    return any(marked.max is not None for marked in getattr(tensor, "_dynamo_dynamic_range", ()))


def _isolated_compiles(code: CodeType) -> int:
    """Return how many times the running call of `torch.compile` compiled `code`, including this time.

    0 if it counts all.
    """
    if not isolated():
        return 0
    from torch._dynamo.convert_frame import _get_cache_entries_for_region, get_eval_frame_isolate_recompiles_id

    region = get_eval_frame_isolate_recompiles_id()
    return len(_get_cache_entries_for_region(code, region)) + 1 if region >= 0 else 0


def isolated() -> dict[str, bool]:
    """Return arguments with which `torch.compile` counts only its own recompiles; none before torch 2.13."""
    knows = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if knows else {}
