"""A step of Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019) in one pass over memory.

For parameter p, averages m and v, gradient g, in float32, at step t = 1, 2, ... (AMSGrad is not here):

    g  = -g if maximize;  g = g / grad_scale, where there is one
    AdamW: p = p - lr * weight_decay * p          Adam: g = g + weight_decay * p
    m  = m + (1 - beta1) * (g - m)
    v  = beta2 * v + (1 - beta2) * g^2
    p  = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

All of one shape, whatever it is; p, m, v and `copy` contiguous. `copy`, where there is one, receives p in its own
dtype: the parameter that the model computes with, of which p is the master. Where `found_inf` is not 0, nothing is
changed.
The order of operations is that of `torch.optim.Adam(fused=False)`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .launch import on_device_of, on_gpu, tl, triton

_BLOCK = 1024


def reference(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    maximize: bool,
) -> None:
    """What the op computes, in plain torch, in place."""
    if found_inf is not None and found_inf.item() != 0:
        return
    t = step.item()
    g = -grad.to(param.dtype) if maximize else grad.to(param.dtype)
    if grad_scale is not None:
        g = g / grad_scale
    if adamw:
        param.mul_(1 - lr * weight_decay)
    elif weight_decay != 0:
        g = g.add(param, alpha=weight_decay)
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**t)).add_(eps)
    param.addcdiv_(exp_avg, root, value=-(lr / (1 - beta1**t)))
    if copy is not None:
        copy.copy_(param)


@triton.jit
def step_kernel(  # type: ignore[no-untyped-def]
    param_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, copy_ptr, step_ptr, scale_ptr, inf_ptr, size,
    lr, beta2, rest1, rest2, log2_beta1, log2_beta2, eps, weight_decay,
    HAS_COPY: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_INF: tl.constexpr,
    ADAMW: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a block. The step is read on the device, so that a recorded graph of kernels may be replayed."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if HAS_INF:
        size = tl.where(tl.load(inf_ptr) == 0, size, 0)
    inside = at < size
    param = tl.load(param_ptr + at, mask=inside, other=0.0)
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
    step = tl.load(step_ptr).to(tl.float64)
    if MAXIMIZE:
        g = -g
    if HAS_SCALE:
        g = g / tl.load(scale_ptr)
    if ADAMW:
        param = param * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * param
    exp_avg = exp_avg + rest1 * (g - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * g * g
    # beta^t = 2^(t log2 beta); in float64, as beta^t is near to 1 at first
    correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp2(step * log2_beta2)).to(tl.float32)
    root = tl.sqrt(exp_avg_sq) / tl.sqrt(correction2) + eps
    param = param - lr / correction1 * exp_avg / root
    tl.store(param_ptr + at, param, mask=inside)
    tl.store(exp_avg_ptr + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=inside)
    if HAS_COPY:
        tl.store(copy_ptr + at, param.to(copy_ptr.dtype.element_ty), mask=inside)


def launch(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    maximize: bool,
) -> None:
    """`reference` by the Triton kernel."""
    size = param.numel()
    if size == 0:
        return
    with on_device_of(param):
        step_kernel[(-(-size // _BLOCK),)](
            *(param, exp_avg, exp_avg_sq, grad.contiguous()),
            *(other if other is not None else param for other in (copy, step, grad_scale, found_inf)),
            *(size, lr, beta2, 1 - beta1, 1 - beta2, _log2(beta1), _log2(beta2), eps, weight_decay),
            HAS_COPY=copy is not None,
            HAS_SCALE=grad_scale is not None,
            HAS_INF=found_inf is not None,
            ADAMW=adamw,
            MAXIMIZE=maximize,
            BLOCK=_BLOCK,
        )


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -1e6  # 2^-1e6 is 0 as well


@torch.library.custom_op(
    "dsgraph::adam_step_",
    mutates_args=("param", "exp_avg", "exp_avg_sq", "copy"),
    schema="(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor(d!)? copy, Tensor step, "
    "Tensor? grad_scale, Tensor? found_inf, *, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool adamw, bool maximize) -> ()",
)
def adam_step_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **options: Any,
) -> None:
    """A step of Adam or AdamW, in place.

    Args:
        param: float32 (on the CPU float64 as well), contiguous, of any shape.
        exp_avg: Average of the gradients, like `param`; zeros ahead of the first step.
        exp_avg_sq: Average of their squares, likewise.
        grad: The gradient, of the same shape and any float dtype.
        copy: Receives the new `param` in its dtype, bfloat16 or float16. None: there is none.
        step: The number of this step, from 1 on: one element, on the device of `param`, as all others are.
        grad_scale: By which the gradient is divided: one element. None: 1.
        found_inf: One element; where it is not 0, nothing is changed, `step` is the caller's. None: 0.
        options: `lr`, the learning rate; `beta1` and `beta2`, the shares of the old in `exp_avg` and `exp_avg_sq`;
            `eps`, added to the root of `exp_avg_sq`; `weight_decay`, its factor; `adamw`, whether decay works on the
            parameter, or on the gradient; `maximize`, whether to ascend.

    Raises:
        ValueError: Shapes, dtypes, layouts or devices do not fit.
    """
    reason = why_not(param, exp_avg, exp_avg_sq, grad, copy, step=step, grad_scale=grad_scale, found_inf=found_inf)
    if reason is not None:
        raise ValueError(f"dsgraph::adam_step_: {reason}")
    compute = launch if on_gpu(param) and param.dtype == torch.float32 else reference
    compute(param, exp_avg, exp_avg_sq, grad, copy, step, grad_scale, found_inf, **options)


adam_step_.register_fake(lambda *tensors, **options: None)


def why_not(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    *,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> str | None:
    """Why the op cannot take these, or None."""
    others = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad, "copy": copy}
    for name, item in others.items():
        if item is not None and item.shape != param.shape:
            return f"{name} has shape {list(item.shape)} and param {list(param.shape)}; both must be the same"
    numbers = {"step": step, "grad_scale": grad_scale, "found_inf": found_inf}
    for name, item in {**others, **numbers}.items():
        if item is not None and item.device != param.device:
            return f"{name} is on {item.device} and param on {param.device}; both must be on one device"
    for name, item in {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "copy": copy}.items():
        if item is not None and not item.is_contiguous():
            return f"{name} is not contiguous; hand over contiguous memory, as it is written to"
    if param.dtype not in (torch.float32, torch.float64) or (param.dtype == torch.float64 and param.is_cuda):
        return f"param is {param.dtype}; it takes float32 masters, and the model's parameter as copy"
    if not param.dtype == exp_avg.dtype == exp_avg_sq.dtype:
        return (
            f"exp_avg is {exp_avg.dtype}, exp_avg_sq {exp_avg_sq.dtype} and param {param.dtype}; all must be the same"
        )
    return None
