"""The plan of a tensor-parallel model: the slice of each parameter."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsgraph.compat.compiled import allowing_recompiles
from dsgraph.compat.tensors import new_fake_mode
from dsgraph.passes.ir.graph import bodies, placeholders
from dsgraph.passes.parallel.find_slices import FoundSlices, find_slices
from dsgraph.passes.parallel.slice_products import weight_chain
from dsgraph.passes.parallel.slice_walk import Sliced
from dsgraph.passes.parallel.slices import Slice
from dsgraph.passes.parallel.unfuse_products import WeightPiece, unfuse_products
from dsgraph.utils.errors import PartitionError

from .plan_styles import slice_of_parameter, slices_of_module


def plan_by_names(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Slice]:
    """Return the slices of a user's plan.

    Args:
        model: The model.
        plan: Pattern of names of modules and parameters, in which `*` matches one part of a name, -> style. Names are
            those of `model` or of its base model (`model.base_model_prefix`). Later entries replace earlier ones.

    Raises:
        PartitionError: A style is unknown or not supported, a pattern matches nothing, a module has no weight that can
            be sharded, or two entries shard one parameter in two ways.
    """
    if not plan:
        raise PartitionError(f"plan: it is empty ({type(model).__name__} has no plan of its own): use plan='auto'")
    firsts = {id(param): name for name, param in model.named_parameters()}
    same = {name: firsts[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Slice] = {}
    sources: dict[str, str] = {}
    for pattern, style in plan.items():
        for name, held in _slices_of(model, pattern, style).items():
            first = same[name]
            if held is None:
                found.pop(first, None)
                continue
            if found.get(first, held) != held and sources[first] != name:
                raise PartitionError(
                    f"plan: {sources[first]!r} and {name!r} are one parameter, and the plan shards it along dimension "
                    f"{found[first].dim} and along {held.dim}: leave one out"
                )
            found[first], sources[first] = held, name
    return found


def _slices_of(model: nn.Module, pattern: str, style: object) -> dict[str, Slice | None]:
    """Return the slices of the parameters that a pattern matches; plans of transformers may match nothing."""
    prefix = getattr(model, "base_model_prefix", "")
    for spelled in (pattern, f"{prefix}.{pattern}") if prefix else (pattern,):
        fits = re.compile(re.escape(spelled).replace(r"\*", r"[^.]+")).fullmatch
        found: dict[str, Slice | None] = {}
        modules = [(name, module) for name, module in model.named_modules() if fits(name)]
        for name, module in modules:
            found |= slices_of_module(pattern, style, name=name, module=module)
        parameters = [(name, param) for name, param in model.named_parameters(remove_duplicate=False) if fits(name)]
        for name, param in parameters:
            found[name] = slice_of_parameter(pattern, style, parameter=param)
        if modules or parameters:
            return found
    config = getattr(model, "config", None)
    own = (getattr(model, "_tp_plan", None) or {}, getattr(config, "base_model_tp_plan", None) or {})
    if any(pattern in plan for plan in own):  # transformers has one plan for all variants of a model
        return {}
    raise PartitionError(
        f"plan: no module or parameter is called {pattern!r}; names are those of model.named_modules() and "
        "model.named_parameters()"
    )


def plan_by_graph(
    model: nn.Module, inputs: Any, *, ranks: int, given: Mapping[str, Slice] | None, unfuses: bool = True
) -> FoundSlices:
    """Find the parameters of a model that can be sharded, on its captured graphs.

    Args:
        model: The model.
        inputs: Keyword arguments of its forward, or a tuple of positional ones.
        ranks: Number of ranks.
        given: A user's slices, whose number of pieces is determined; None: all that can be sharded.
        unfuses: True to shard fused weights with pieces of different sizes, which each forward gathers.
    """
    mode = new_fake_mode()
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = mode.from_tensor(tensor.detach())
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    twin = copy.deepcopy(model, memo)
    names = {id(param): name for name, param in twin.named_parameters()}
    found = FoundSlices()

    def analyse(gm: GraphModule, values: list[Any]) -> Callable[..., Any]:
        nodes = zip(placeholders(gm), values, strict=True)
        parameters = {node: names[id(value)] for node, value in nodes if id(value) in names}
        chains = {gm: {node: [node] for node in parameters}}
        for body, outer in bodies(gm):
            chains[body] = {inside: weight_chain(node) for inside, node in outer.items()}
        for graph, read in chains.items():
            held = {inside: parameters[chain[-1]] for inside, chain in read.items() if chain[-1] in parameters}
            # A checkpoint's body may get the transpose of a matrix.
            turned = {held[inside] for inside, chain in read.items() if inside in held and len(chain) % 2 == 0}
            fixed = None if given is None else _turned(given, turned)
            one = _plan_of(graph, held, ranks=ranks, given=fixed, unfuses=unfuses)
            found.slices.update(_turned(one.slices, turned))
            found.whole.update(one.whole)
        return gm.forward

    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    faked = {key: mode.from_tensor(x.detach()) if isinstance(x, Tensor) else x for key, x in pairs}
    compiled = torch.compile(twin, backend=analyse, dynamic=False)
    with mode, allowing_recompiles(), torch.random.fork_rng(devices=[]):
        if isinstance(inputs, Mapping):
            compiled(**{str(key): value for key, value in faked.items()})
        else:
            compiled(*faked.values())
    return found


def _turned(slices: Mapping[str, Slice], turned: Collection[str]) -> dict[str, Slice]:
    """Return slices of which some are those of the matrices' transposes."""
    return {name: Slice(1 - held.dim, held.parts) if name in turned else held for name, held in slices.items()}


def _plan_of(
    gm: GraphModule, names: Mapping[Node, str], *, ranks: int, given: Mapping[str, Slice] | None, unfuses: bool
) -> FoundSlices:
    """Return the plan of a graph. A fused weight is sharded along its outputs if a piece of it is."""
    roots: dict[Node, int | None] = dict.fromkeys(names) if unfuses and given is None else {}
    pieces = unfuse_products(gm, roots, Sliced(ranks))
    pieces_of: dict[Node, dict[str, WeightPiece]] = {}
    for piece in pieces:
        name = f"{names[piece.root]}[{piece.first}:{piece.last}]"
        pieces_of.setdefault(piece.root, {})[name] = piece
    of_pieces = {piece.node: name for own in pieces_of.values() for name, piece in own.items()}
    found = find_slices(gm, {**names, **of_pieces}, ranks=ranks, given=given)
    for root, own in pieces_of.items():
        held = {found.slices.pop(name, None) for name in own} - {None}
        reasons = [found.whole.pop(name) for name in own if name in found.whole]
        (dim,) = {piece.dim for piece in own.values()}
        size = root.meta["example_value"].shape[dim]
        if not held or size % ranks:
            found.whole[names[root]] = reasons[0] if reasons else f"its {size} rows cannot be divided by {ranks} ranks"
        else:
            found.slices[names[root]] = Slice(dim)
    return found
