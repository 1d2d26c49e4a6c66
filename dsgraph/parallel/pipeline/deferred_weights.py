"""Matrix products for zero-bubble schedules: weight gradients are computed later than input gradients.

Torch splits a stage's backward by walking autograd's graph, which fails for residual models ("saved tensor that has
been detached in-place") and where a parameter is used twice. Here the backward of a stage is one backward. Its linear
layers put the gradients of their weights into a queue, which the schedule's weight action computes; all other gradients
are computed immediately. The schedules are those of Qi et al.: Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor, nn
from torch.fx import GraphModule, Node


class WeightQueue:
    """A queue of weight gradients that are still to be computed.

    Attributes:
        after_gradient: Called with a parameter when its `.grad` has been added to, as hooks of autograd are.
    """

    def __init__(self) -> None:
        self.after_gradient: Callable[[nn.Parameter], None] | None = None
        self._left: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []

    def add(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Add a gradient to the queue."""
        self._left.append((weight, gradient))

    def take(self) -> Callable[[], None]:
        """Return a function that computes all queued gradients and adds them to `.grad`; the queue is emptied."""
        taken, self._left = self._left, []

        def run() -> None:
            with torch.no_grad():
                while taken:
                    weight, gradient = taken.pop()
                    weight.grad = gradient() if weight.grad is None else weight.grad.add_(gradient())
                    if self.after_gradient is not None:
                        self.after_gradient(weight)

        return run


def defer_weights(gm: GraphModule, queue: WeightQueue) -> None:
    """Make the products of a stage with parameters queue the gradients of these parameters, in place.

    before:  y = linear(x, w, b)
    after:   y = _deferred_linear(x, w, b)
    """
    for node in list(gm.graph.nodes):
        kind = _kind(gm, node)
        if kind is None:
            continue
        name = f"_deferred_{kind}"
        if name not in gm._modules:
            gm.add_module(name, _Deferred(queue, is_transposed=kind == "addmm"))
        x, weight, bias = _operands(node, kind)
        node.op, node.target, node.args, node.kwargs = "call_module", name, (x, weight, bias), {}
    gm.recompile()


def _kind(gm: GraphModule, node: Node) -> str | None:
    if node.op != "call_function" or node.target not in (F.linear, torch.addmm):
        return None
    kind = "addmm" if node.target is torch.addmm else "linear"
    if kind == "addmm" and (len(node.args) != 3 or node.kwargs):  # with alpha or beta, or keyword operands
        return None
    if kind == "linear" and (len(node.args) < 2 or node.kwargs.keys() - {"bias"}):
        return None
    weight = _operands(node, kind)[1]
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return None
    path, _, leaf = str(weight.target).rpartition(".")
    parameter = gm.get_submodule(path)._parameters.get(leaf)
    return kind if parameter is not None and parameter.requires_grad and parameter.dim() == 2 else None


def _operands(node: Node, kind: str) -> tuple[Any, Any, Any]:
    if kind == "addmm":
        bias, x, weight = node.args
        return x, weight, bias
    x, weight, *rest = node.args
    return x, weight, rest[0] if rest else node.kwargs.get("bias")


class _Deferred(nn.Module):
    """A matrix product with a parameter."""

    def __init__(self, queue: WeightQueue, *, is_transposed: bool) -> None:
        super().__init__()
        self._queue, self._is_transposed = queue, is_transposed

    def forward(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Any:
        """Return `x @ weight.T + bias`, or `x @ weight + bias` for a transposed weight."""
        return _DeferredProduct.apply(x, weight, bias, self._queue, self._is_transposed)


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, queue: WeightQueue, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.is_transposed = queue, is_transposed
        ctx.parameter, ctx.bias = weight, None if bias is None else (bias.shape, bias.dtype)
        return torch.addmm(bias, x, weight) if is_transposed else F.linear(x, weight, bias)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        is_transposed = ctx.is_transposed

        def of_weight() -> Tensor:  # under autocast the product had a lower precision
            rows, grads = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
            return (rows.t() @ grads if is_transposed else grads.t() @ rows).to(weight.dtype)

        ctx.queue.add(ctx.parameter, of_weight)
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            narrow = weight.to(grad.dtype)
            of_x = (grad @ (narrow.t() if is_transposed else narrow)).to(x.dtype)
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            of_bias = grad.sum_to_size(shape).to(dtype)
        return of_x, None, of_bias, None, None
