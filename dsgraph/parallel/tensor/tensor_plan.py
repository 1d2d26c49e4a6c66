"""The plan of a tensor-parallel model: the slice of each parameter."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.fx import GraphModule

from dsgraph.compat.compiled import allowing_recompiles
from dsgraph.compat.tensors import new_fake_mode
from dsgraph.passes.ir.graph import bodies, placeholders
from dsgraph.passes.parallel.find_slices import FoundSlices, find_slices
from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import PartitionError

# As transformers spells them in `tp_plan`, and shorter.
_COLUMN = ("colwise", "column", "colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "row", "rowwise_rep")


def plan_by_names(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Slice]:
    """Return the slices of a user's plan.

    Args:
        model: The model.
        plan: Pattern of module names, in which `*` matches one part of a name, -> style.

    Raises:
        PartitionError: A style is unknown, a pattern matches no module, or a module has no weight that can be sharded.
    """
    found: dict[str, Slice] = {}
    for pattern, style in plan.items():
        fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        modules = [(name, module) for name, module in model.named_modules() if fits.fullmatch(name)]
        if not modules:
            raise PartitionError(f"plan: no module is called {pattern!r}; names are those of model.named_modules()")
        for name, module in modules:
            found |= _slices_of(name, module, is_row=_is_row(pattern, style))
    return found


def _is_row(pattern: str, style: object) -> bool:
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return isinstance(style, RowwiseParallel)
    if style in _COLUMN or style in _ROW:
        return style in _ROW
    raise PartitionError(
        f"plan[{pattern!r}] is {style!r}; it takes 'colwise', 'rowwise', or ColwiseParallel() and RowwiseParallel() of "
        "torch.distributed.tensor.parallel"
    )


def _slices_of(name: str, module: nn.Module, *, is_row: bool) -> dict[str, Slice]:
    weight, bias = (module._parameters.get(attribute) for attribute in ("weight", "bias"))
    if weight is None or weight.dim() != 2:
        raise PartitionError(
            f"plan: module {name!r} ({type(module).__name__}) has no weight of two dimensions to be sliced: name "
            "linear layers and embeddings"
        )
    # An embedding is `[rows, width]`, a `Conv1D` of transformers `[inputs, outputs]`.
    outputs = 1 if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" else 0
    found = {f"{name}.weight": Slice(1 - outputs if is_row else outputs)}
    if bias is not None and not is_row:
        found[f"{name}.bias"] = Slice(0)
    return found


def plan_by_graph(model: nn.Module, inputs: Any, *, ranks: int, given: Mapping[str, Slice] | None) -> FoundSlices:
    """Find the parameters of a model that can be sharded, on its captured graphs.

    Args:
        model: The model.
        inputs: Keyword arguments of its forward, or a tuple of positional ones.
        ranks: Number of ranks.
        given: A user's slices, whose number of pieces is determined; None: all that can be sharded.
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
        graphs = {gm: parameters}
        for body, outer in bodies(gm):
            graphs[body] = {inside: parameters[node] for inside, node in outer.items() if node in parameters}
        for graph, held in graphs.items():
            one = find_slices(graph, held, ranks=ranks, given=given)
            found.slices.update(one.slices)
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
