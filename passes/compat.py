"""Every private torch API that the compiler uses, in one place.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module, _use_lazy_graph_module
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "autograd_count",
    "captured_gradients",
    "captured_input",
    "compiled_when_run",
    "describe_saved",
    "detect_fake_mode",
    "fake_mode_of",
    "invoke_subgraph",
    "is_compiled_when_run",
    "is_to_local",
    "kind_of_saved_value",
    "known_sizes",
    "make_graph_module",
    "merge_equal_nodes",
    "min_cut_rematerialization_partition",
    "put_opaque_values_last",
    "running_autograd_node",
    "schema_of",
    "set_grad_enabled",
    "storage_id",
    "symbolic_expression",
    "written_inputs",
]

# Calls a graph that stands beside the graph at hand. Inductor makes one function of it, however often it is called.
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def compiled_when_run() -> contextlib.AbstractContextManager[None]:
    """Within, graph modules that torch's partitioners and `make_graph_module` make become Python code when they run."""
    return _use_lazy_graph_module(True)


def merge_equal_nodes(graph: Graph) -> Graph:
    """A copy of a joint graph in which torch's partitioner has merged what is computed twice, as it does by default."""
    return fx_graph_cse(graph)


def is_compiled_when_run(gm: GraphModule) -> bool:
    """Whether a module was made within `compiled_when_run`."""
    return isinstance(gm, _LazyGraphModule)


def make_graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A module of a graph, as torch's partitioners make theirs: see `compiled_when_run`."""
    return _make_graph_module(root, graph)


def autograd_count() -> int:
    """How many autograd nodes this thread has made so far: each gets the next number."""
    return int(torch.autograd._get_sequence_nr())


def running_autograd_node() -> int | None:
    """The number of the autograd node that is running; None outside a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


# What `torch.no_grad()` becomes in a captured graph.
set_grad_enabled = torch._C._set_grad_enabled


def put_opaque_values_last(forward: GraphModule, backward: GraphModule, *, num_fwd_outputs: int) -> None:
    """Restores the order of saved values that AOTAutograd counts on: tensors, then opaque objects, then symbolic sizes.

    Where a checkpoint region draws random numbers, torch's partitioner appends the generators' states behind the opaque
    objects (a `DTensor`'s mesh), in the forward's outputs as well as in the backward's inputs (2.11.0 to 2.13.0).
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
    """By which the forward's saved values are sorted: 0 for a tensor, 1 for an opaque object, 2 for a size."""
    value = node.meta.get("val")
    if isinstance(value, FakeScriptObject):
        return 1
    return 0 if isinstance(value, torch.Tensor) else 2


def describe_saved(output: Node, num_fwd_outputs: int, *, added: int = 0, removed: Collection[int] = ()) -> None:
    """Keeps AOTAutograd's descriptions of a forward's outputs true to what is saved.

    Args:
        output: The forward's output node.
        num_fwd_outputs: How many outputs, which come first, are the model's.
        added: How many saved values stand behind these that were not there.
        removed: Which outputs are no longer there, by the numbers that they had.
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
    """Whether a node of a captured graph takes a `DTensor`'s local tensor; torch 2.11 wraps it in a function a call."""
    if node.op == "call_method":
        return node.target == "to_local"
    name = getattr(node.target, "__qualname__", "")
    return node.op == "call_function" and name.startswith("TensorVariable.method_to_local.")


def is_tangent(placeholder: Node) -> bool:
    """Whether a placeholder of a joint or backward graph is the gradient of one of the forward's outputs."""
    return "tangents" in placeholder.name  # as AOTAutograd names them


def captured_input(placeholder: Node) -> int | None:
    """Which input of the captured graph a placeholder of the joint graph came from; None for tangents and the like.

    AOTAutograd takes a `DTensor` input apart into its shard and its mesh; both come from the same input.
    """
    return _input_number(placeholder.meta.get("desc"))


def _input_number(desc: AOTInput | None) -> int | None:
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def symbolic_expression(size: torch.SymInt) -> int | sympy.Expr:
    """A symbolic size as an expression over the symbols of its graph, or the number that it is known to be."""
    expression: sympy.Expr = size.node.expr
    return int(expression) if expression.is_number else expression


def known_sizes(size: torch.SymInt) -> Mapping[sympy.Symbol, int]:
    """The symbols of a symbolic size with the numbers that they had when the graph was traced."""
    shapes: Any = size.node.shape_env
    numbers = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val  # before 2.12
    symbols = size.node.expr.free_symbols
    return {symbol: int(numbers[symbol]) for symbol in symbols if symbol in numbers}


def fake_mode_of(value: object) -> Any:
    """The mode of a fake tensor, in which more of its kind are made; a context that does nothing for other values."""
    return value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Names, defaults and aliases of an op's arguments and results."""
    return op._schema


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for fake tensors that share memory; of use while they live."""
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
    """Output number of a joint or backward graph -> the input of the captured graph whose gradient it is.

    Of a `DTensor`'s gradient, the shard's output; a forward or inference graph has none.
    """
    found = {}
    for number, desc in enumerate(output.meta.get("desc") or ()):
        base: AOTOutput | None = desc
        while isinstance(base, SubclassGetAttrAOTOutput):
            base = base.base if base.attr == "_local_tensor" else None
        if isinstance(base, GradAOTOutput) and isinstance(base.grad_of, PlainAOTInput):
            found[number] = base.grad_of.idx
    return found
