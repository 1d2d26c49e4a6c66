"""Attention as a CUDA device computes it, in a graph that is traced on the CPU.

`F.scaled_dot_product_attention` becomes one op or another according to the device that traces it. Here torch's choice
for CUDA is made, in its order: flash attention, then memory-efficient attention.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import detect_fake_mode
from dsgraph.passes.ir.graph import (
    all_graph_modules,
    bound_arguments,
    emit,
    find_calls,
    replace_and_erase,
    sort_topologically,
)

aten = torch.ops.aten

_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_ON_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_ON_CUDA = (
    *(_FLASH, aten._scaled_dot_product_flash_attention_backward.default),
    *(_EFFICIENT, aten._scaled_dot_product_efficient_attention_backward.default),
)


def capture_cuda_attention(gm: GraphModule) -> None:
    """Let a captured graph call CUDA's attention where it calls `F.scaled_dot_product_attention`.

    So what follows is traced with the strides that CUDA's result has.
    """
    for module in all_graph_modules(gm):
        for node in find_calls(module, F.scaled_dot_product_attention):
            node.target = _attention
        module.recompile()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` as CUDA does.

    Arguments that no CUDA kernel accepts are left to torch.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    op = _choose(query, key, value, attn_mask, is_causal=is_causal)
    if op is _FLASH:
        flash: Tensor = _FLASH(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return flash
    if op is _EFFICIENT:
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        efficient: Tensor = _EFFICIENT(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
        return efficient
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as memory-efficient attention expects it: added, one row for each query of each head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])


def replace_cpu_attention(gm: GraphModule) -> None:
    """Replace the CPU's attention by CUDA's, in a joint or inference graph: Inductor has put it there.

    Left alone is what no CUDA kernel takes: head sizes that are no multiple of 16 bytes, masks whose rows are not.

    before:  o = _flash_attention_for_cpu(q, k, v); dq = _flash_attention_for_cpu_backward(do, q, k, v, o[0], o[1])
    after:   o = _flash_attention(q, k, v);         dq = _flash_attention_backward(do, q, k, v, o[0], o[1], o[6], ...)
    """
    for module in all_graph_modules(gm):
        calls = find_calls(module, _ON_CPU)
        for node in calls:
            call = bound_arguments(node)
            query, key, value = (call[name].meta["val"] for name in ("query", "key", "value"))
            mask = None if call["attn_mask"] is None else call["attn_mask"].meta["val"]
            chosen = _choose(query, key, value, mask, is_causal=call["is_causal"])
            backwards = [user for user in find_calls(module, _ON_CPU_BACKWARD) if _forward_of(user) is node]
            if chosen is not None:
                _replace(node, backwards, chosen)
        if calls:
            sort_topologically(module.graph)  # torch's own pattern for attention leaves that for later
            _carry_strides_on(module)
            module.recompile()


def _carry_strides_on(gm: GraphModule) -> None:
    """Recompute the metadata of the nodes after CUDA's attention, whose results have other strides than the CPU's."""
    attention = {node for node in gm.graph.nodes if node.target in _ON_CUDA}
    changed = attention | {item for node in attention for item in node.users}
    for node in gm.graph.nodes:
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        target = aten.reshape.default if node.target is aten.view.default else node.target  # as Inductor has it later
        mode = detect_fake_mode([argument.meta["val"] for argument in node.all_input_nodes])
        assert mode is not None
        with mode, torch.no_grad():
            value = target(*args, **kwargs)
        if _strides(value) != _strides(node.meta["val"]):
            node.meta["val"] = value
            changed.add(node)


def _strides(value: Any) -> list[Any]:
    return [
        item.stride() for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, Tensor)
    ]


def _choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> Any:
    """Return the op that takes these arguments on CUDA; None if there is none."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    if any(size * query.element_size() % 16 for size in sizes) or any(x.stride(-1) != 1 for x in (query, key, value)):
        return None
    if mask is not None and (key.shape[-2] % 8 or mask.shape[-1] != key.shape[-2]):
        return None
    half = query.dtype in (torch.float16, torch.bfloat16)
    lengths_agree = not is_causal or query.shape[-2] == key.shape[-2]
    if half and mask is None and lengths_agree and len(sizes) == 1 and max(sizes) <= 256:
        return _FLASH
    return _EFFICIENT if query.shape[1] == key.shape[1] else None


def _forward_of(backward: Node) -> Node | None:
    """Return the forward call whose log-sum-exp a backward call reads."""
    logsumexp = bound_arguments(backward)["logsumexp"]
    return logsumexp.args[0] if logsumexp.target is operator.getitem else None


def _replace(node: Node, backwards: list[Node], op: Any) -> None:
    call = bound_arguments(node)
    inputs = [call[name] for name in ("query", "key", "value")]
    options = (call["dropout_p"], call["is_causal"])
    scale = {"scale": call["scale"]}
    bias = _bias(node, call)
    if op is _FLASH:
        attention = emit(node, _FLASH, *inputs, *options, False, **scale)
    else:
        attention = emit(node, _EFFICIENT, *inputs, bias, bool(backwards), *options, **scale)
    _inherit(node, attention)
    results = {number: _item(node, attention, number) for number in range(len(attention.meta["val"]))}
    for item in list(node.users):
        if item.target is operator.getitem:  # both give the output first, and the log-sum-exp second
            number = cast("int", item.args[1])
            _inherit(item, results[number])
            replace_and_erase(item, results[number])
    for backward in backwards:
        _replace_backward(backward, op, inputs, results, bias)
    node.graph.erase_node(node)
    for result in results.values():
        if not result.users:
            node.graph.erase_node(result)


def _replace_backward(backward: Node, op: Any, inputs: list[Node], results: dict[int, Node], bias: Any) -> None:
    call = bound_arguments(backward)
    given, options, scale = call["grad_out"], (call["dropout_p"], call["is_causal"]), {"scale": call["scale"]}
    if op is _FLASH:
        lengths = [fake.meta["val"].shape[-2] for fake in inputs[:2]]
        rest = [results[0], results[1], None, None, *lengths, *options, results[6], results[7]]
        gradients = emit(
            backward, aten._scaled_dot_product_flash_attention_backward.default, given, *inputs, *rest, **scale
        )
    else:
        rest = [bias, results[0], results[1], results[2], results[3], options[0], [True, True, True, False], options[1]]
        gradients = emit(
            backward, aten._scaled_dot_product_efficient_attention_backward.default, given, *inputs, *rest, **scale
        )
    _inherit(backward, gradients)
    backward.replace_all_uses_with(gradients)  # dq, dk, dv come first
    backward.graph.erase_node(backward)


def _bias(node: Node, call: dict[str, Any]) -> Node | None:
    """Return the mask, one row for each query of each head."""
    mask: Node | None = call["attn_mask"]
    if mask is None:
        return None
    query, key = call["query"].meta["val"], call["key"].meta["val"]
    shape = [*query.shape[:-1], key.shape[-2]]
    return mask if list(mask.meta["val"].shape) == shape else emit(node, aten.expand.default, mask, shape)


def _item(before: Node, attention: Node, number: int) -> Node:
    item = emit(before, operator.getitem, attention, number)
    _inherit(before, item)
    return item


def _inherit(old: Node, new: Node) -> None:
    """Copy what autograd and checkpoint regions noted on a node."""
    new.meta = {**old.meta, **{"val": new.meta["val"]}}
    value = old.meta["val"]
    assert not isinstance(value, Tensor) or value.shape[:2] == new.meta["val"].shape[:2]
