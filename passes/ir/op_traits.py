"""Properties of an op without running it: the arguments that it writes to, aliases of its results, its effects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch.fx import Node

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.compat import HigherOrderOperator, OpOverload, schema_of

aten = torch.ops.aten

# Namespaces whose schemas are reliable: those of torch and of this package.
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "dsgraph", "inductor", "rngprims"})

# Higher-order ops that write to nothing and communicate with nobody, given that the op that they wrap is known.
_PURE_HIGHER_ORDER = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "graphsafe_run_with_rng_state",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "triton_kernel_wrapper_functional",
    }
)
_WRITING_HIGHER_ORDER = frozenset({"triton_kernel_wrapper_mutation"})

# Modules of Python functions that stand in ATen graphs: arithmetic of sizes, and items of tuples.
_PURE_MODULES = frozenset({"_operator", "operator", "math", "torch.fx.experimental.sym_node"})
_PURE_BUILTINS = frozenset({abs, bool, divmod, float, int, max, min, pow, round, sum})

# Ops whose schema does not say that their result is their first argument's memory.
_UNDECLARED_ALIASES = frozenset(
    {aten._unsafe_view.default, c10d_functional.wait_tensor.default, torch.ops.dsgraph.wait_transfer.default}
)

_RESIZE_STORAGE = torch.ops.inductor.resize_storage_bytes_.default

# "Views" that copy when they must, and so read.
_MAY_COPY = frozenset({aten.reshape, aten.reshape_as, aten.contiguous, aten.to, aten.flatten})

# Ops that look at their argument's shape alone.
_SHAPE_ONLY = frozenset(
    {
        *(aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset, aten.sym_is_contiguous),
        *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
        *(aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
    }
)

# Besides views and pointwise ops: ops through which a sum over ranks stays a sum over ranks. Of collectives, roles say.
_CARRIES_SUMS = frozenset(
    {
        *(aten._to_copy, aten.clone, aten._unsafe_view, aten.cat, aten.stack, aten.constant_pad_nd, aten.sum),
        *(aten.slice_scatter, aten.select_scatter, aten.split_with_sizes_copy, aten.copy, aten.mean, aten.index),
        *(torch.ops.prims.convert_element_type, c10d_functional.wait_tensor, torch.ops.dsgraph.store_gradient),
        *(torch.ops.dsgraph.compress_momentum, torch.ops.dsgraph.compress_average),
        *(torch.ops.dsgraph.unpack_signs, torch.ops.dsgraph.own_slice),
    }
)

Argument = tuple[int, str]
"""An argument of an op: its position, and its name if it is passed by name."""


@dataclass(frozen=True)
class OpTraits:
    """The properties of an op.

    Attributes:
        writes: Arguments that it writes to.
        shares: Arguments whose memory its results may share.
        reads: True if it reads its arguments' data, unlike a view or a query of the shape.
        knowledge: "known"; "wraps" if it depends on the op in the call's arguments; "unknown" if it may do anything.
        writes_anything: True if it may write to any argument, because its schema does not say.
        carries_sums: True if a partial sum as argument gives a partial sum as result (views, casts, pointwise). For
            collectives, see `Collective.role`.
    """

    writes: tuple[Argument, ...] = ()
    shares: tuple[Argument, ...] = ()
    reads: bool = True
    knowledge: Literal["known", "wraps", "unknown"] = "known"
    writes_anything: bool = False
    carries_sums: bool = False


def traits(node: Node) -> OpTraits:
    """Return the properties of the op that a node calls; a call of a module or a method may do anything."""
    if node.op == "call_function":
        return _traits_of(node.target)
    if node.op in ("call_module", "call_method"):
        return _UNKNOWN
    return _NOTHING


@lru_cache(maxsize=2048)
def parameters_of(target: OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    """Return, for each argument in an op's schema, its name, whether it may be positional, and its default."""
    return tuple((each.name, not each.kwarg_only, each.default_value) for each in schema_of(target).arguments)


@lru_cache(maxsize=2048)
def result_aliases(target: OpOverload) -> tuple[tuple[Argument, ...], ...]:
    """Return, for each result in an op's schema, the arguments whose memory it shares."""
    schema = schema_of(target)
    sets = [frozenset(result.alias_info.before_set) if result.alias_info else () for result in schema.returns]
    owned = [
        ((number, argument.name), argument.alias_info.before_set)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]
    return tuple(tuple(owner for owner, marks in owned if not marks.isdisjoint(names)) for names in sets)


def argument_nodes(node: Node, arguments: tuple[Argument, ...]) -> Iterator[Node]:
    """Yield the nodes that a call passes for some of its op's arguments."""
    for position, name in arguments:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        if isinstance(value, Node):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Node))


def written_nodes(node: Node) -> Iterator[Node]:
    """Yield the nodes whose memory a call is known to write to."""
    known = traits(node)
    if known.writes:
        yield from argument_nodes(node, known.writes)
    elif known.writes_anything:
        yield from node.all_input_nodes


def is_unknown(node: Node) -> bool:
    """Return whether a call may do anything at all: write, communicate, depend on earlier calls."""
    known = traits(node).knowledge
    if known != "wraps":
        return known == "unknown"
    wrapped = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, OpOverload)]
    return any(op.namespace not in _KNOWN_NAMESPACES for op in wrapped)


def releases(node: Node) -> Node | None:
    """Return the node whose memory a call releases; None for any other call."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is _RESIZE_STORAGE:
        return _argument(node, 0, "variable") if _argument(node, 1, "new_size") == 0 else None
    if target is aten.resize_.default:
        size = _argument(node, 1, "size")
        return _argument(node, 0, "self") if isinstance(size, (list, tuple)) and 0 in size else None
    if target is aten.set_.default:
        return _argument(node, 0, "self")
    return None


def allocates(node: Node) -> Node | None:
    """Return the node that a call allocates again, after `releases`; None for any other call."""
    if node.op != "call_function" or releases(node) is not None:
        return None
    if node.target is _RESIZE_STORAGE:
        return _argument(node, 0, "variable")
    is_set = isinstance(node.target, OpOverload) and node.target.overloadpacket is aten.set_
    return _argument(node, 0, "self") if is_set or node.target is aten.resize_.default else None


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


_NOTHING = OpTraits(reads=False)
_UNKNOWN = OpTraits(knowledge="unknown", writes_anything=True)


@lru_cache(maxsize=2048)
def _traits_of(target: Any) -> OpTraits:
    if isinstance(target, OpOverload):
        return _traits_of_overload(target)
    if isinstance(target, HigherOrderOperator):
        name = target.name()
        is_pure, writes = name in _PURE_HIGHER_ORDER, name in _WRITING_HIGHER_ORDER
        # AOTAutograd has made the bodies of the others free of writes, but they may communicate.
        return OpTraits(knowledge="wraps" if is_pure else "unknown", writes_anything=writes)
    return _traits_of_python(cast("Callable[..., Any]", target))


def _traits_of_overload(target: OpOverload) -> OpTraits:
    arguments = list(enumerate(schema_of(target).arguments))
    writes = tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    if target is _RESIZE_STORAGE:  # its schema does not say so
        writes = ((0, "variable"),)
    returns_alias = any(value.alias_info is not None for value in schema_of(target).returns)
    shares = tuple((n, a.name) for n, a in arguments if returns_alias and a.alias_info is not None)
    if target in _UNDECLARED_ALIASES:
        shares = ((0, schema_of(target).arguments[0].name),)
    packet = target.overloadpacket
    is_pure_view = target.is_view and packet not in _MAY_COPY
    return OpTraits(
        writes=writes,
        shares=shares,
        reads=not is_pure_view and packet not in _SHAPE_ONLY and target is not _RESIZE_STORAGE,
        knowledge="known" if target.namespace in _KNOWN_NAMESPACES else "unknown",
        carries_sums=target.is_view or torch.Tag.pointwise in target.tags or packet in _CARRIES_SUMS,
    )


def _traits_of_python(target: Callable[..., Any]) -> OpTraits:
    if target is operator.getitem:
        return OpTraits(shares=((0, "a"),), reads=False, carries_sums=True)
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    is_arithmetic = target in _PURE_BUILTINS or (module.startswith("torch") and name.startswith("sym_"))
    if is_arithmetic or module in _PURE_MODULES or module.startswith("torch.utils._sympy"):
        return OpTraits(reads=False)
    return _UNKNOWN
