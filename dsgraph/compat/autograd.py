"""Autograd: the running backward, versions, hooks, transforms, checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch


def profiler_runs() -> bool:
    """Return True while one of torch's profilers runs in this process."""
    return bool(torch._C._autograd._profiler_enabled())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has accumulated all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def running_backward() -> int:
    """Return a number of the running backward, another one for each; -1 outside."""
    return torch._C._current_graph_task_id()


def enclosing_node() -> Any:
    """Return the node of the outermost function whose backward has started the running one; None if there is none."""
    frame: FrameType | None = sys._getframe()
    is_inside, found = False, None
    while frame is not None:
        if frame.f_code is torch.autograd.graph._engine_run_backward.__code__:
            is_inside = True
        elif is_inside and frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def call_after(node: Any, call: Callable[[], None]) -> None:
    """Call `call` once when the backward that runs `node` has come to a node after it."""

    def go_on(_: Any) -> None:
        for handle in handles:
            handle.remove()
        call()

    handles = [following.register_prehook(go_on) for following, _ in node.next_functions if following is not None]


def is_compiled_backward(node: Any) -> bool:
    """Return True for the autograd node that AOTAutograd makes of a compiled graph's backward."""
    return type(node).__name__ == "CompiledFunctionBackward"


def compiled_backwards(outputs: Any) -> Iterator[Any]:
    """Yield the autograd nodes of a compiled graph's backward; a graph may return views of a node's output."""
    frontier: list[Any] = (
        [out.grad_fn for out in outputs if isinstance(out, torch.Tensor)] if isinstance(outputs, (list, tuple)) else []
    )
    seen: set[Any] = {None}
    while frontier:
        node = frontier.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_compiled_backward(node):
            yield node
        else:
            frontier += [following for following, _ in node.next_functions]


def accumulates(leaf: Any) -> bool:
    """Return True if the running backward adds to the `.grad` of the leaf with this autograd node."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # `torch.autograd.grad` hands it to its caller
        return False


def is_asked_for(leaf: Any) -> bool:
    """Return True if `torch.autograd.grad` hands the gradient of the leaf with this autograd node to its caller."""
    try:
        torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        return True
    return False


def is_accumulation(node: Any) -> bool:
    """Return True for the autograd node that adds gradients to the `.grad` of its `variable`."""
    return type(node).__name__ == "AccumulateGrad"


def autograd_node(leaf: torch.Tensor) -> Any:
    """Return the autograd node that adds gradients to the `.grad` of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def outer_hooks() -> Any:
    """Return the functions by which the innermost `saved_tensors_hooks` packs and unpacks tensors; None outside."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def keeping_version(tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return a context in which writes to `tensors` do not invalidate what autograd saved of them."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that each in-place write to `tensor` raises."""
    return tensor._version


def in_transform() -> bool:
    """Return True inside a transform of `torch.func` (`vmap`, `grad`, ...); Dynamo knows the answer, too."""
    # Dynamo knows this call on all versions, and wraps its None: `is not None` would always hold there.
    return isinstance(torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter)


def outside_transforms() -> Any:
    """Return a context outside all transforms of `torch.func`; to them, what it computes is a constant."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def without_transforms(tensor: Any) -> Any:
    """Return the tensor that transforms of `torch.func` map over or differentiate; `tensor` if none does."""
    return torch.func.debug_unwrap(tensor) if isinstance(tensor, torch.Tensor) else tensor


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
    """Return True if something is called when a gradient of `param` is computed or accumulated."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def has_tensor_hooks(param: torch.Tensor) -> bool:
    """Return True if a user's function is called when a gradient of `param` is computed."""
    hooks: dict[int, Any] = param._backward_hooks or {}
    return not all(hasattr(hook, "dsgraph_hook") for hook in hooks.values())
