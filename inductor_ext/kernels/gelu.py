"""GELU in Triton kernels: gelu(x) = x * p(x), with p a probability and p' its density."""

from __future__ import annotations

from .launch import tl, triton


@triton.jit
def gelu_probability(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return p, the normal distribution or its approximation by tanh."""
    if TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_density(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the derivative of p."""
    if TANH:
        # 1 - p is p of the other sign; as a difference it would lose all digits where p is near 1
        return (
            gelu_probability(x, TANH)
            * gelu_probability(-x, TANH)
            * (2 * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x))
        )
    else:
        return 0.3989422804014327 * tl.exp(-0.5 * x * x)
