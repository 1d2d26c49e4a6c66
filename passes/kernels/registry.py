"""The table of kernels that the compiler may substitute. A new kernel is a file in `patterns/` and an entry here."""

from __future__ import annotations

from .patterns import (
    add_layer_norm,
    add_rms_norm,
    attention,
    bias_gelu,
    decode_attention,
    geglu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    skinny_linear,
    softmax_dropout,
    swiglu,
)
from .spec import KernelSpec

KERNELS: tuple[KernelSpec, ...] = (
    *(attention.SPEC, linear_cross_entropy.SPEC, add_layer_norm.SPEC, layer_norm.SPEC, add_rms_norm.SPEC),
    *(rms_norm.SPEC, rope.SPEC, swiglu.SPEC, geglu.SPEC, bias_gelu.SPEC, softmax_dropout.SPEC),
    *(skinny_linear.SPEC, decode_attention.SPEC),
)
"""All built-in kernels, in the order in which the graph is searched for them at a node.

Some patterns contain others: a LayerNorm divides by the root mean square of a difference, the input of a norm may be a
sum with a residual, that of GEGLU a sum with a bias, and an attention may contain the dropout of its softmax. The
larger pattern comes first.
"""


def largest_first(kernels: tuple[KernelSpec, ...]) -> tuple[KernelSpec, ...]:
    """Return kernels in an order in which none replaces a part of a larger one.

    Those that are not in `KERNELS` stay.
    """
    ordered = iter(sorted((spec for spec in kernels if spec in KERNELS), key=KERNELS.index))
    return tuple(next(ordered) if spec in KERNELS else spec for spec in kernels)


def register_kernels() -> None:
    """Register the kernels that Inductor can fuse with their neighbours."""
    for kernel in KERNELS:
        if kernel.register is not None:
            kernel.register()
