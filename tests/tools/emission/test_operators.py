from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from dsgraph.tools.emission.operators import refuse_cpu_operators
from dsgraph.utils.errors import EmissionError


@torch.library.custom_op("emission_tests::only_cpu", mutates_args=(), device_types="cpu")
def only_cpu(x: torch.Tensor) -> torch.Tensor:
    return x * 2


only_cpu.register_fake(torch.empty_like)


@torch.library.custom_op("emission_tests::anywhere", mutates_args=())
def _anywhere(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _graph(op) -> Graph:
    graph = Graph()
    node = graph.call_function(op, (graph.placeholder("x"),))
    node.stack_trace = '  File "/somewhere/model.py", line 7, in forward\n    return op(x)\n'
    return graph


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.emission_tests.only_cpu.default,
        torch.ops.aten.mkldnn_linear.default,
        torch.ops.aten._weight_int4pack_mm_for_cpu.default,
        torch.ops.mkldnn._linear_pointwise.default,
        torch.ops.quantized.linear_dynamic.default,
    ],
    ids=str,
)
def test_ops_of_the_cpu_are_refused_by_name_and_line(op):
    with pytest.raises(EmissionError, match=rf"{op} has only a kernel for the CPU \(/somewhere/model\.py:7\)"):
        refuse_cpu_operators(_graph(op).nodes)


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.emission_tests.anywhere.default,
        torch.ops.aten.mm.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops.dsgraph.gather_param.default,
    ],
    ids=str,
)
def test_others_are_not(op):
    refuse_cpu_operators(_graph(op).nodes)
