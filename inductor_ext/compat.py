"""Private torch APIs that the ops use, in one place.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import CDLL
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import ProcessGroup, Work

# Functional collectives: public as `torch.distributed._functional_collectives`, whose Python wrappers add a tensor
# subclass that the ops and the lowered graphs do not want. Dynamo, AOTAutograd and Inductor all know these ops.
c10d_functional = torch.ops._c10d_functional

# As Dynamo writes `F.gelu` and `F.linear`.
nn_gelu, nn_linear = torch._C._nn.gelu, torch._C._nn.linear


def resolve_group(name: str) -> ProcessGroup:
    """Return the process group that a graph names. There is no public lookup by name."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast("Any", name))


def backend_name(group: ProcessGroup, device_type: str) -> str:
    """Return the backend of a group's collectives on a kind of device: "gloo", "nccl", "fake", ..."""
    return str(group._get_backend(torch.device(device_type)).name())


def register_work(tensor: Tensor, work: Work | None) -> None:
    """Make `wait_tensor(tensor)` wait for `work`, as for a functional collective; several are all waited for.

    Public code has no way to give a custom op a result that is not complete yet.
    """
    from torch._C._distributed_c10d import _register_work

    if work is not None:  # None: this rank is not in the group
        _register_work(tensor, work)


@cache
def lower_as_collective(op: OpOverload) -> None:
    """Make Inductor treat `op` as a functional collective.

    Its first argument and its result are one tensor each; or both are lists of equally many tensors, in one order.

    An unknown op could run in another order than other collectives, and in another order on other ranks. Imports
    Inductor, which takes a second: call it when something is about to be compiled.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    add_layout_constraint(op, constrain_to_fx_strides)

    @register_lowering(op, type_promotion_kind=None)
    def lower(given: Any, *args: Any) -> Any:
        result = ir._CollectiveKernel.create_out_of_place(op, given, *args)
        return list(map(ir.TensorBox.create, result)) if isinstance(result, list) else ir.TensorBox.create(result)


@cache
def lower_as_call(op: OpOverload) -> None:
    """Make Inductor call `op` as it is, with arguments of the graph's strides, without a warning.

    Imports Inductor, which takes a second: call it when something is about to be compiled.
    """
    from torch._inductor.lowering import (
        add_layout_constraint,
        constrain_to_fx_strides,
        fallback_handler,
        register_lowering,
    )

    add_layout_constraint(op, constrain_to_fx_strides)
    register_lowering(op, type_promotion_kind=None)(fallback_handler(op, add_to_fallback_set=False))


@cache
def lower_as_wait(op: OpOverload) -> None:
    """Make Inductor treat `op` as the wait for a functional collective: its result is its only argument.

    Imports Inductor, which takes a second: call it when something is about to be compiled.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(op, type_promotion_kind=None)
    def lower(given: Any) -> Any:
        ir._WaitKernel.create_wait(op, given)
        return given


def cpp_library(source: str, *, fuses_products: bool = False) -> CDLL:
    """Return the C functions of C++ source, built once for each compiler and its options, into Inductor's file cache.

    Ranks wait for the one that builds. Imports Inductor, which takes seconds: call it when a function is needed.

    Args:
        source: C++ source, which may include torch's stable headers.
        fuses_products: True allows to add a product without rounding it first; False forbids it, whatever the options
            of Inductor.

    Raises:
        RuntimeError: There is no compiler, or it refused the source.
        OSError: The library cannot be written or loaded.
    """
    from torch._inductor.codecache import CppCodeCache

    contract = "fast" if fuses_products else "off"
    return cast("CDLL", CppCodeCache.load(source, extra_flags=(f"-ffp-contract={contract}",)))


def statically_true(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes holds for every batch, as far as is known. It adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def size_hint(size: int | torch.SymInt) -> int | None:
    """Return a size as a number, for a dynamic one that of the current batch; it adds no guard."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if isinstance(hint, int) else None


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, or fake ones, are views of one memory. A storage has no public identity."""
    if not all(tensor.layout is torch.strided and torch._C._has_storage(tensor) for tensor in (one, other)):
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def decompose(op: OpOverload, function: Callable[..., Any], *, at_times: bool = False) -> None:
    """Make Inductor trace through `function` in place of `op`, so that it fuses with its neighbours.

    With `at_times` the function may return NotImplemented: then the op is called as it is.

    Imports Inductor, which takes a second: call it when something is about to be compiled.
    """
    from torch._inductor.decomposition import decompositions, fast_random_decomps, register_decomposition

    if op not in decompositions:
        register_decomposition([op])(function)
        fast_random_decomps.cache_clear()  # a copy of the table, made when Inductor first compiled
        if at_times:
            from torch._inductor.lowering import constrain_to_fx_strides, make_fallback

            make_fallback(op, constrain_to_fx_strides, override_decomp=True)


@cache
def never_merge(op: OpOverloadPacket) -> None:
    """Tell AOTAutograd that an op draws random numbers, so that two equal calls are not merged.

    For merging it uses a list of its own instead of `torch.Tag.nondeterministic_seeded`. Imports sympy, which takes two
    seconds: call it when something is traced.
    """
    from torch._functorch.compile_utils import rand_ops

    if op not in rand_ops:
        rand_ops.append(op)


def int8_product(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return torch's own product of (m, k) with int8 (n, k), transposed, times `scale` (n,).

    For bfloat16 on the CPU.
    """
    return torch.ops.aten._weight_int8pack_mm(x, packed, scale)


def plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which tensors are real, even while a graph is traced with fake ones."""
    from torch.utils._python_dispatch import _disable_current_modes

    return cast("AbstractContextManager[None]", _disable_current_modes())


def allow_recompiles(count: int) -> AbstractContextManager[None]:
    """Return a context in which Dynamo compiles a function for up to `count` kinds of arguments.

    Sizes of tensors become dynamic as usual.
    """
    import torch._dynamo.config

    settings = {"recompile_limit": count, "specialize_int": True}
    return cast("AbstractContextManager[None]", torch._dynamo.config.patch(settings))


@contextmanager
def transforms_in_kernel() -> Iterator[None]:
    """Let autograd and `vmap` run inside the kernel of a custom op as they do outside.

    The dispatcher calls such a kernel with autograd's keys excluded for the thread, and below a dispatch mode, such as
    AOTAutograd's in the first run of a graph, with those of functorch; `torch.enable_grad` alone has no effect there.
    """
    key = torch._C.DispatchKey
    excluded = (
        *(key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView),
        *(key.FuncTorchDynamicLayerFrontMode, key.FuncTorchDynamicLayerBackMode),
        *(key.FuncTorchBatched, key.FuncTorchVmapMode, key.FuncTorchGradWrapper),
    )
    with torch._C._PreserveDispatchKeyGuard():
        for each in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(each, False)
        yield


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, *, added: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return torch's fused CPU attention over `[g, m, d]` and `[g, s, d]`, and the sums for its backward.

    The public function keeps the logarithms of sums, float32 `[g, m]` (float64 for float64), for its own backward.

    Args:
        q: Queries; also in bfloat16 or float16.
        k: Keys.
        v: Values, as wide as keys.
        added: Added to the scores, in the dtype of q, broadcast over `[g, m, s]`.
        scale: The factor of the scores.
    """
    lifted = [item.unsqueeze(1) for item in (q, k, v)]
    y, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *lifted, attn_mask=_lifted(added, q, k), scale=scale
    )
    return y.squeeze(1), sums.squeeze(1)


def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, *, added: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `cpu_attention`."""
    lifted = [item.unsqueeze(1) for item in (grad, q, k, v, y, sums)]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *lifted, 0.0, False, attn_mask=_lifted(added, q, k), scale=scale
    )
    dq, dk, dv = (item.squeeze(1) for item in found)
    return dq, dk, dv


def _lifted(added: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if added is None else added.expand(len(q), q.shape[1], k.shape[1]).unsqueeze(1)
