"""Private torch APIs that the compiler uses, in one place.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module, _use_lazy_graph_module
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# Names of torch that other modules import from here.
__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "detect_fake_mode",
    "min_cut_rematerialization_partition",
]

# Calls another graph of the module, a region: see `inline_regions`.
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def compiled_when_run() -> contextlib.AbstractContextManager[None]:
    """Return a context in which graph modules of torch's partitioners are compiled when they run."""
    return _use_lazy_graph_module(True)


def without_merging() -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch's partitioner does not merge equal nodes."""
    return functorch_config.patch(cse=False)


def is_compiled_when_run(gm: GraphModule) -> bool:
    """Return whether a module was made within `compiled_when_run`."""
    return isinstance(gm, _LazyGraphModule)


def make_graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """Return a module of a graph, made as torch's partitioners do: see `compiled_when_run`."""
    return _make_graph_module(root, graph)


def autograd_count() -> int:
    """Return the number of autograd nodes that this thread has made so far: each gets the next number."""
    return int(torch.autograd._get_sequence_nr())


def running_autograd_node() -> int | None:
    """Return the number of the running autograd node; None outside a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


# What `torch.no_grad()` becomes in a captured graph.
set_grad_enabled = torch._C._set_grad_enabled


def put_opaque_values_last(forward: GraphModule, backward: GraphModule, *, num_fwd_outputs: int) -> None:
    """Restore the order of saved values that AOTAutograd requires: tensors, then opaque objects, then symbolic sizes.

    If a checkpoint region draws random numbers, torch's partitioner appends the generators' states after the opaque
    objects (a `DTensor`'s mesh), in the forward's outputs and in the backward's inputs (2.11.0 to 2.13.0).
    """
    (output,) = forward.graph.find_nodes(op="output")
    values = list(output.args[0])
    saved = values[num_fwd_outputs:]
    ordered = sorted(saved, key=kind_of_saved_value)  # stable
    if ordered != saved:
        output.args = ((*values[:num_fwd_outputs], *ordered),)
        forward.recompile()
    inputs = backward.graph.find_nodes(op="placeholder")
    first_tangent = next(filter(is_tangent, inputs), None)
    opaque = [node for node in inputs if kind_of_saved_value(node) == 1]
    if first_tangent is not None and opaque:
        for node in opaque:
            first_tangent.prepend(node)
        backward.recompile()


def kind_of_saved_value(node: Node) -> int:
    """Return the sort key of a saved value: 0 for a tensor, 1 for an opaque object, 2 for a size."""
    value = node.meta.get("val")
    if isinstance(value, FakeScriptObject):
        return 1
    return 0 if isinstance(value, torch.Tensor) else 2


def plain_input(number: int) -> AOTInput:
    """Return AOTAutograd's description of an input of a captured graph."""
    return PlainAOTInput(number)


def plain_output(number: int) -> AOTOutput:
    """Return AOTAutograd's description of an output of a captured graph."""
    return PlainAOTOutput(number)


def gradient_output(number: int) -> AOTOutput:
    """Return AOTAutograd's description of the gradient of an input of a captured graph."""
    return GradAOTOutput(PlainAOTInput(number))


def describe_saved(output: Node, num_fwd_outputs: int, *, added: int = 0, removed: Collection[int] = ()) -> None:
    """Update AOTAutograd's descriptions of a forward's outputs after a change of the saved values.

    Args:
        output: The forward's output node.
        num_fwd_outputs: Number of outputs that are the model's; they come first.
        added: Number of new saved values after these.
        removed: Former numbers of the removed outputs.
    """
    known = output.meta.get("desc")
    if known is None:
        return
    gone = frozenset(removed)
    descs = [desc for number, desc in enumerate(known) if number not in gone]
    descs[num_fwd_outputs:num_fwd_outputs] = [SavedForBackwardsAOTOutput(0)] * added
    saved = [replace(desc, idx=number) for number, desc in enumerate(descs[num_fwd_outputs:])]
    output.meta["desc"] = [*descs[:num_fwd_outputs], *saved]


def is_to_local(node: Node) -> bool:
    """Return whether a node of a captured graph takes a `DTensor`'s local tensor.

    Torch 2.11 wraps it in a function call.
    """
    if node.op == "call_method":
        return node.target == "to_local"
    name = getattr(node.target, "__qualname__", "")
    return node.op == "call_function" and name.startswith("TensorVariable.method_to_local.")


def is_tangent(placeholder: Node) -> bool:
    """Return whether a placeholder of a joint or backward graph is the gradient of one of the forward's outputs."""
    return "tangents" in placeholder.name  # as AOTAutograd names them


def captured_input(placeholder: Node) -> int | None:
    """Return the number of the captured graph's input of a joint graph's placeholder; None for tangents and others.

    AOTAutograd splits a `DTensor` input into its shard and its mesh; both have the same number.
    """
    return _input_number(placeholder.meta.get("desc"))


def _input_number(desc: AOTInput | None) -> int | None:
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def symbolic_expression(size: torch.SymInt) -> int | sympy.Expr:
    """Return a symbolic size as an expression over the symbols of its graph, or as a number if it is known."""
    expression: sympy.Expr = size.node.expr
    return int(expression) if expression.is_number else expression


def known_sizes(size: torch.SymInt) -> Mapping[sympy.Symbol, int]:
    """Return the symbols of a symbolic size with their values when the graph was traced."""
    shapes: Any = size.node.shape_env
    numbers = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val  # before 2.12
    symbols = size.node.expr.free_symbols
    return {symbol: int(numbers[symbol]) for symbol in symbols if symbol in numbers}


def fake_mode_of(value: object) -> Any:
    """Return the mode of a fake tensor, in which more fake tensors are made; an empty context for other values."""
    return value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()


def new_fake(mode: Any, like: torch.Tensor, device: torch.device | str) -> FakeTensor:
    """Return a fake tensor of new memory, without running an op: that takes ten times as long.

    Args:
        mode: The mode of fake tensors.
        like: A tensor with its sizes, strides and dtype. A plain tensor on "meta" is used itself, others are copied.
        device: Its device.
    """
    with no_dispatch():
        is_meta = type(like) is torch.Tensor and like.is_meta
        return FakeTensor(mode, like if is_meta else torch.empty_like(like, device="meta"), torch.device(device))


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an op: names, defaults and aliases of its arguments and results."""
    return op._schema


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for fake tensors that share memory; it is valid while they live."""
    return int(tensor.untyped_storage()._cdata)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return True for a tensor inside `vmap`, whose memory cannot be inspected."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def written_inputs(output: Node) -> set[int]:
    """Return the inputs whose new values a joint graph returns, such as a batch norm's running mean."""
    descs = output.meta.get("desc") or ()
    found = (_input_number(desc.mutated_input) for desc in descs if isinstance(desc, InputMutationAOTOutput))
    return {number for number in found if number is not None}


def captured_gradients(output: Node) -> dict[int, int]:
    """Return output number of a joint or backward graph -> input of the captured graph whose gradient it is.

    For a `DTensor`'s gradient, this is the shard's output; a forward or inference graph has none.
    """
    found = {}
    for number, desc in enumerate(output.meta.get("desc") or ()):
        base: AOTOutput | None = desc
        while isinstance(base, SubclassGetAttrAOTOutput):
            base = base.base if base.attr == "_local_tensor" else None
        if isinstance(base, GradAOTOutput) and isinstance(base.grad_of, PlainAOTInput):
            found[number] = base.grad_of.idx
    return found
