"""Matrix products for zero-bubble schedules: weight gradients are computed later than input gradients.

Torch splits a stage's backward by walking autograd's graph, which fails for residual models ("saved tensor that has
been detached in-place") and where a parameter is used twice. Here the backward of a stage is one backward, compiled or
not. The gradients of its linear layers' weights go to a queue, which the schedule's weight action computes; all other
gradients are computed immediately. The schedules are those of Qi et al.: Zero Bubble Pipeline Parallelism, arXiv
2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsgraph.compat.autograd import version_of
from dsgraph.passes.compat import is_batched

from .schedule_order import most_deferred


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


@dataclass
class DeferredWeights:
    """The matrix products of a stage whose weight gradients are computed later.

    Each product reads its weight detached, so that the stage's backward does not compute the gradient, and passes
    through `_Tap`. There the gradient of its result leaves the stage's graph as that of an extra argument. The product
    of that gradient with the rows that the stage returns goes to a queue.

    Attributes:
        queue: The queue of weight gradients.
        products: The products, in the order of the extra arguments.
        results: Number of extra results of the stage: for each product an empty tensor of its dtype, then the rows that
            the products multiply.
        kept: Bytes of these rows and of the gradients of all products, which a micro-batch keeps after its backward.
    """

    queue: WeightQueue
    products: tuple[_Product, ...]
    results: int
    kept: int

    @property
    def largest(self) -> int:
        """The bytes of the largest weight gradient."""
        return max((product.weight.nbytes for product in self.products), default=0)

    def call(self, run: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Call the stage and return its own results."""
        extra: list[Tensor] = []
        zeros = [_Gradient.apply(product, self.queue, extra, product.weight) for product in self.products]
        results = run(*arguments, *zeros)
        own = len(results) - self.results
        extra += results[own:]
        return results[:own]


@dataclass(frozen=True)
class _Product:
    """A matrix product with a weight.

    Attributes:
        weight: The weight.
        like: Number of the empty tensor of its dtype among the extra results of the stage.
        rows: Number of its rows among them.
        is_transposed: True for `rows @ weight`, False for `rows @ weight.T`.
        shape: Shape of its result.
    """

    weight: nn.Parameter
    like: int
    rows: int
    is_transposed: bool
    shape: torch.Size

    def gradient(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the weight, in its dtype. Under autocast the product has a lower precision."""
        rows, grads = rows.reshape(-1, rows.shape[-1]).to(grad.dtype), grad.reshape(-1, grad.shape[-1])
        return (rows.t() @ grads if self.is_transposed else grads.t() @ rows).to(self.weight.dtype)


def defer_weights(gm: GraphModule, queue: WeightQueue) -> DeferredWeights:
    """Leave the gradients of a stage's weights to a queue, in place.

    before:  y = linear(x, w, b)
             return y
    after:   y = _tap(linear(x, w.detach(), b), gradient_0)
             return y, y.new_empty(0), x.detach()
    """
    graph, output = gm.graph, gm.graph.output_node()
    found = [(node, kind) for node in graph.nodes if (kind := _kind(gm, node)) is not None]
    read = [_operands(node, kind)[0] for node, kind in found]
    places = [next(iter(graph.nodes)), *graph.find_nodes(op="placeholder")]
    products = []
    for number, (node, kind) in enumerate(found):
        weight = _operands(node, kind)[1]
        with graph.inserting_after(places[-1]):
            places.append(graph.placeholder(f"gradient_{number}"))
        with graph.inserting_before(node):
            node.update_arg(_place_of_weight(kind), graph.call_method("detach", (weight,)))
        with graph.inserting_after(node):
            tap = graph.call_function(_tap, (node, places[-1]))
        node.replace_all_uses_with(tap, delete_user_cb=lambda user, tap=tap: user is not tap)
        rows = len(found) + list(dict.fromkeys(read)).index(read[number])
        shape = node.meta["val"].shape
        products.append(_Product(gm.get_parameter(str(weight.target)), number, rows, kind == "addmm", shape))
    with graph.inserting_before(output):
        likes = [graph.call_method("new_empty", (node, 0)) for node, _ in found]
        rows_read = [graph.call_method("detach", (x,)) for x in dict.fromkeys(read)]
    results: Any = output.args[0]
    output.args = ((*results, *likes, *rows_read),)
    gm.recompile()
    kept = sum(node.meta["val"].nbytes for node in (*dict.fromkeys(read), *(node for node, _ in found)))
    return DeferredWeights(queue, tuple(products), len(likes) + len(rows_read), kept)


def deferred_bytes(stages: Mapping[int, DeferredWeights | None], actions: Sequence[str]) -> int:
    """Return the most bytes that wait for weight gradients on a rank, with the largest of these gradients.

    Args:
        stages: The stages of the rank; None: nothing is deferred.
        actions: What the rank computes, in order, as torch writes it.
    """
    kept = {number: 0 if stage is None else stage.kept for number, stage in stages.items()}
    return most_deferred(actions, kept) + max(0 if stage is None else stage.largest for stage in stages.values())


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
    if is_batched(node.meta["val"]) or version_of(node.meta["val"]) > 0:  # inside `vmap`, or written to later
        return None
    path, _, leaf = str(weight.target).rpartition(".")
    parameter = gm.get_submodule(path)._parameters.get(leaf)
    return kind if parameter is not None and parameter.requires_grad and parameter.dim() == 2 else None


def _place_of_weight(kind: str) -> int:
    return 2 if kind == "addmm" else 1


def _operands(node: Node, kind: str) -> tuple[Any, Any, Any]:
    if kind == "addmm":
        bias, x, weight = node.args
        return x, weight, bias
    x, weight, *rest = node.args
    return x, weight, rest[0] if rest else node.kwargs.get("bias")


class _Gradient(torch.autograd.Function):
    """An extra argument of a stage. The gradient of a weight is computed later from the gradient of this argument."""

    @staticmethod
    def forward(ctx: Any, product: _Product, queue: WeightQueue, extra: list[Tensor], weight: nn.Parameter) -> Tensor:
        ctx.product, ctx.queue, ctx.extra = product, queue, extra
        return weight.new_zeros(()).expand(product.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        product, extra = ctx.product, ctx.extra
        grad = grad.to(extra[product.like].dtype)  # autograd casts it to the dtype of the argument
        ctx.queue.add(product.weight, lambda: product.gradient(extra[product.rows], grad))
        return None, None, None, None


class _Tap(torch.autograd.Function):
    """The identity of a value, whose gradient also goes to another argument."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, argument: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def _tap(value: Tensor, argument: Tensor) -> Tensor:
    return cast(Tensor, _Tap.apply(value, argument))
