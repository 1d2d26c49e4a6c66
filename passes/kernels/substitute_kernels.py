"""SubstituteKernels: one kernel computes what a graph writes as several small ops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from dsgraph.passes.compat import fake_mode_of
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult, source_fingerprint
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import all_graph_modules

from .add_call import add_call, compute, meta_like, with_gradient_as
from .capture_graph import interior, place_of, reader_of_layout, same_layout, transforms_begun, why_unsafe
from .findings import Findings
from .matching import fake_of
from .registry import KERNELS, largest_first
from .spec import Derived, KernelSpec, Match, NearMiss, Setting

_TRANSFORMED = "it is inside a transform of torch.func, which does not know the kernel"


@dataclass(frozen=True)
class SubstituteKernels(GraphPass):
    """Replace sequences of ops by a kernel that is equal in exact arithmetic and does not round more often.

    before:  wide = x.float(); root = rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
             y = weight * (wide * root).to(bfloat16)
    after:   y = getitem(rms_norm(x, weight, 1e-6, offset=0.0, norm_dtype=bfloat16, dtype=bfloat16), 0)

    It runs before autograd, so each kernel brings its own derivative. Patterns are `KernelSpec.match`. A match is left
    alone, with a note, if an intermediate result that the kernel does not return has other readers, if the graph writes
    to its inputs before its end, if gradients are switched on or off inside it, or if the kernel does not support its
    shapes or dtypes. Unless the kernel was requested by name, also if there is no gain (Inductor generates kernels of
    pointwise ops and of reductions itself), and if there is a `Match.caveat`.

    Attributes:
        kernels: The kernels to look for.
        asked: Names of requested kernels: they are substituted even without a gain, and one that matches nowhere is
            noted, with the calls of torch's own function that does the same.
    """

    kernels: tuple[KernelSpec, ...] = KERNELS
    asked: tuple[str, ...] = ()

    phase: ClassVar[Phase] = Phase.CAPTURE
    provides: ClassVar[frozenset[str]] = frozenset({"substituted-kernels"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        found = Findings()
        kernels = largest_first(self.kernels)
        for module in all_graph_modules(gm):
            transforms = 0
            for node in list(module.graph.nodes):
                transforms += transforms_begun(node)
                for spec in kernels:
                    if node not in found.erased and spec.is_anchor(node):
                        self._try(spec, node, ctx=ctx, found=found, transformed=transforms > 0)
        found.note_absent([spec for spec in self.kernels if spec.name in self.asked], gm)
        return PassResult(sum(found.substituted.values()), tuple(found.notes), tuple(found.done()))

    def fingerprint(self) -> str | None:
        codes = [code for spec in self.kernels for code in (spec.match, spec.reference)]
        prints = [source_fingerprint(code, self.name) for code in (type(self), *codes)]
        if None in prints:
            return None
        return "".join([repr((self.kernels, self.asked)), *map(str, prints)])

    def _try(self, spec: KernelSpec, node: Node, *, ctx: PassContext, found: Findings, transformed: bool) -> None:
        answer = spec.match(node)
        if answer is None:
            return
        if not isinstance(answer, (Match, NearMiss)):
            raise PassError(
                f"kernel {spec.name!r}: its match answers {answer!r}; a Match, a NearMiss or None is expected"
            )
        if isinstance(answer, Match) and not all(0 < number < spec.results for number in answer.others):
            raise PassError(
                f"kernel {spec.name!r}: others of its match are results {', '.join(map(str, answer.others))}; it has "
                f"{spec.results}, of which the first, 0, is the node's own"
            )
        if isinstance(answer, NearMiss):
            found.miss(spec, answer.node, answer.reason)
            return
        reason = _TRANSFORMED if transformed else _why_not(spec, answer)
        made = _evaluate(spec, answer) if reason is None else None
        reason = reason or _why_not_laid_out_so(spec, answer, made)
        if reason is not None:
            found.miss(spec, answer.node, reason)
            return
        if answer.caveat and spec.name not in self.asked:
            ask = f"options={{'kernels': [{spec.name!r}]}} substitutes it anyway"
            found.miss(spec, answer.node, f"{answer.caveat}; {ask}")
            return
        setting = Setting(ctx.fuses, _device_type(answer), training=not ctx.inference)
        gain = spec.gain(answer, setting)
        if not gain.is_worth_it and spec.name not in self.asked:
            found.leave(spec, gain)
            return
        found.taken.update(other.name for other in self.kernels if _takes_place_of(spec, other, node))
        found.erased.update(_substitute(spec, answer, made))
        found.substitute(spec, gain, caveat=answer.caveat)


def _takes_place_of(spec: KernelSpec, other: KernelSpec, node: Node) -> bool:
    """Return whether a kernel that is substituted at an anchor replaces another one, which it contains."""
    return other.name in spec.takes_from and other.is_anchor(node) and isinstance(other.match(node), Match)


def _why_not(spec: KernelSpec, match: Match) -> str | None:
    reason = spec.supports(*_values(match), **match.options)
    if reason is not None and not (isinstance(reason, str) and reason):
        raise PassError(f"kernel {spec.name!r}: its supports answers {reason!r}; a reason or None is expected")
    return reason or why_unsafe(match.node, _nodes(match), others=_others(match)) or _why_not_differentiated_so(match)


def _why_not_differentiated_so(match: Match) -> str | None:
    """Return why a result must not need a gradient because another does, or None: all results of an op do, or none."""
    for node in match.others.values():
        if fake_of(node).requires_grad != fake_of(match.node).requires_grad:
            return f"{node.name}, which the kernel gives as well, needs no gradient, and with the kernel would need one"
    return None


def _why_not_laid_out_so(spec: KernelSpec, match: Match, made: Any) -> str | None:
    """Return why the kernel's results must not have their memory layout, or None: a `view` may need other strides."""
    for number, node in {0: match.node, **match.others}.items():
        result, plain = made[number] if spec.results > 1 else made, fake_of(node)
        if not isinstance(plain, torch.Tensor) or same_layout(result, plain):
            continue
        reader = reader_of_layout(node)
        if reader is not None:
            return f"{reader.name} depends on strides of its result that are not the kernel's"
    return None


def _others(match: Match) -> list[Node]:
    return list(match.others.values())


def _nodes(match: Match) -> list[Node]:
    """Return the nodes that the kernel reads, directly or through derived inputs."""
    found: list[Node] = []
    _resolve(match.inputs, found.append, lambda target, args: None)
    return found


def _resolve(item: Any, node: Callable[[Node], Any], call: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    """Return an argument, or a container of arguments, with `node` applied to nodes and `call` to derived inputs."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Derived):
            return call(value.target, map_aggregate(value.args, leaf))
        return node(value) if isinstance(value, Node) else value

    return map_aggregate(item, leaf)


def _values(match: Match) -> Any:
    """Return the fake values of the inputs."""
    with fake_mode_of(fake_of(match.node)), torch.no_grad():
        return _resolve(match.inputs, fake_of, compute)


def _device_type(match: Match) -> str:
    value = fake_of(match.node)
    return str(value.device.type) if isinstance(value, torch.Tensor) else "cpu"


def _substitute(spec: KernelSpec, match: Match, made: Any) -> list[Node]:
    """Insert the op in place of the match's value, or before an earlier reader of one of the others.

    Return the nodes that computed them, which are erased. `made` is the op's fake result.
    """
    node, graph = match.node, match.node.graph
    numbers = {node: 0, **{other: number for number, other in match.others.items()}}
    replaced = interior(node, _nodes(match))
    with graph.inserting_before(place_of(node, _nodes(match), others=_others(match))):
        call = graph.call_function(spec.op, _emit(match), dict(match.options))
    call.meta = meta_like(node, made)
    erased = []
    for old in reversed(replaced):
        if old in numbers and old.users:
            old.replace_all_uses_with(_result(spec, call, old, numbers[old]))
        if not old.users:  # what others read stays
            graph.erase_node(old)
            erased.append(old)
    return erased


def _result(spec: KernelSpec, call: Node, old: Node, number: int) -> Node:
    """Return the node of one of the op's results, in place of `old`."""
    if spec.results == 1:
        return call
    with call.graph.inserting_after(call):
        result = call.graph.call_function(operator.getitem, (call, number))
    result.meta = meta_like(old, call.meta["example_value"][number])
    return result


def _emit(match: Match) -> Any:
    """Return the inputs, with nodes for derived ones at the graph's insertion point."""
    return _resolve(match.inputs, lambda node: node, partial(add_call, match.node))


def _evaluate(spec: KernelSpec, match: Match) -> Any:
    inputs = _values(match)
    with fake_mode_of(fake_of(match.node)), torch.no_grad():
        made = spec.op(*inputs, **match.options)
        results = list(made) if spec.results > 1 else [made]
        for number, node in {0: match.node, **match.others}.items():
            results[number] = with_gradient_as(fake_of(node), results[number])
    return tuple(results) if spec.results > 1 else results[0]
