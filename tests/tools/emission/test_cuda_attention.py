from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from dsgraph.passes.compat import detect_fake_mode
from dsgraph.tools.emission.cuda_attention import capture_cuda_attention, replace_cpu_attention
from dsgraph.tools.emission.operators import refuse_cpu_operators
from dsgraph.utils.errors import EmissionError


def _joint(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """The joint graph of a function."""
    found = []

    def partition(gm: GraphModule, joint_inputs: Any, **_: Any) -> Any:
        found.append(gm)
        raise StopIteration

    compiled = aot_function(function, fw_compiler=lambda gm, _: gm, partition_fn=partition)
    with pytest.raises(StopIteration):
        compiled(*inputs)
    return found[0]


def _heads(dtype: torch.dtype, *, heads: int = 4, time: int = 16, size: int = 32) -> torch.Tensor:
    return torch.randn(2, heads, time, size, dtype=dtype, requires_grad=True)


def _called(gm: GraphModule) -> list[str]:
    targets = [str(node.target).removeprefix("aten._scaled_dot_product_") for node in gm.graph.nodes]
    return [target.removesuffix(".default") for target in targets if "attention" in target]


def _kinds(gm: GraphModule) -> dict[str, tuple[torch.Size, torch.dtype]]:
    (output,) = gm.graph.find_nodes(op="output")
    return {str(n): (x.meta["val"].shape, x.meta["val"].dtype) for n, x in enumerate(output.args[0]) if x is not None}


def _check_strides(gm: GraphModule) -> None:
    """Every value has the strides that its op gives it."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            target = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
            with detect_fake_mode([argument.meta["val"] for argument in node.all_input_nodes]):
                expected = target(*args, **kwargs)
            for found, value in zip(tree_leaves(node.meta["val"]), tree_leaves(expected), strict=True):
                assert not isinstance(found, torch.Tensor) or found.stride() == value.stride(), node.format_node()


@pytest.mark.parametrize(
    ("dtype", "causal", "expected"),
    [
        (torch.bfloat16, True, ["flash_attention", "flash_attention_backward"]),
        (torch.float16, False, ["flash_attention", "flash_attention_backward"]),
        (torch.float32, True, ["efficient_attention", "efficient_attention_backward"]),
    ],
)
def test_cuda_chooses_by_dtype(dtype, causal, expected):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.25).transpose(1, 2).flatten(2)

    gm = _joint(function, _heads(dtype), _heads(dtype), _heads(dtype))
    before = _kinds(gm)
    replace_cpu_attention(gm)
    assert _called(gm) == expected
    assert _kinds(gm) == before
    assert all(node.kwargs["scale"] == 0.25 for node in gm.graph.nodes if "attention" in str(node.target))
    refuse_cpu_operators(gm.graph.nodes)
    gm.graph.lint()
    _check_strides(gm)
    text = gm.print_readable(print_output=False)
    replace_cpu_attention(gm)
    assert gm.print_readable(print_output=False) == text


def test_a_mask_is_for_efficient_attention_which_wants_one_for_each_head():
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    heads = [_heads(torch.bfloat16) for _ in range(3)]
    gm = _joint(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), *heads, mask)
    replace_cpu_attention(gm)
    assert _called(gm) == ["efficient_attention", "efficient_attention_backward"]
    forward, backward = (node for node in gm.graph.nodes if "efficient_attention" in str(node.target))
    assert forward.args[3].meta["val"].shape == (2, 4, 16, 16)
    assert backward.args[4] is forward.args[3]


def test_queries_of_another_length_than_keys_are_not_for_causal_flash_attention():
    inputs = [_heads(torch.bfloat16, time=8), _heads(torch.bfloat16), _heads(torch.bfloat16)]
    gm = _joint(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *inputs)
    replace_cpu_attention(gm)
    assert _called(gm)[0] == "efficient_attention"


def test_attention_that_no_kernel_takes_is_refused_by_name():
    inputs = [_heads(torch.float32, size=5) for _ in range(3)]  # rows of 20 bytes
    gm = _joint(F.scaled_dot_product_attention, *inputs)
    replace_cpu_attention(gm)
    with pytest.raises(EmissionError, match=r"_scaled_dot_product_flash_attention_for_cpu\.default has only a kernel"):
        refuse_cpu_operators(gm.graph.nodes)


@pytest.mark.parametrize(
    ("dtype", "mask", "expected"),
    [
        (torch.bfloat16, None, "flash_attention"),
        (torch.float32, None, "efficient_attention"),
        (torch.bfloat16, torch.ones(16, 16, dtype=torch.bool).tril(), "efficient_attention"),
        (torch.float32, torch.zeros(2, 1, 16, 16), "efficient_attention"),
    ],
)
def test_captured_calls_are_traced_as_cuda_would(dtype, mask, expected):
    def function(q, k, v, m=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m).transpose(1, 2).reshape(2, 16, 128)

    heads = [_heads(dtype) for _ in range(3)]
    captured = torch.fx.symbolic_trace(function, concrete_args=None if mask is not None else {"m": None})
    capture_cuda_attention(captured)
    gm = _joint(captured, *heads, *([] if mask is None else [mask]))
    assert _called(gm) == [expected, f"{expected}_backward"]
    _check_strides(gm)


def test_autocast_holds_for_captured_calls():
    captured = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q))
    capture_cuda_attention(captured)
    with torch.autocast("cpu", torch.bfloat16):
        gm = _joint(captured, _heads(torch.float32))
    assert _called(gm)[0] == "flash_attention"


def test_a_captured_call_that_no_kernel_takes_stays_the_cpus():
    captured = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q))
    capture_cuda_attention(captured)
    q = _heads(torch.float32, size=5)
    assert torch.equal(captured(q), F.scaled_dot_product_attention(q, q, q))
