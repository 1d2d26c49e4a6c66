"""How each kernel is recognised in a captured graph: a file each, of the name of its kernel."""

from dsgraph.inductor_ext.kernel import KernelSpec

from . import attention, bias_gelu, geglu, layer_norm, linear_cross_entropy, rms_norm, rope, softmax_dropout, swiglu

KERNELS: tuple[KernelSpec, ...] = (
    *(attention.SPEC, linear_cross_entropy.SPEC, layer_norm.SPEC, rms_norm.SPEC, rope.SPEC, swiglu.SPEC, geglu.SPEC),
    *(bias_gelu.SPEC, softmax_dropout.SPEC),
)
"""All of them, in the order in which they are looked for at a node.

What a LayerNorm divides by is the root mean square of a difference, what GEGLU lets through may be a sum with a bias,
and an attention may drop what its softmax computes: the larger pattern comes first.
"""
