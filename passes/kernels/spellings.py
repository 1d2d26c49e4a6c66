"""Tables of the spellings of torch's calls, and of their arguments, by which `matching` reads graphs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it

from dsgraph.inductor_ext.compat import nn_gelu, nn_linear

# Canonical name -> parameters in order; those with a default as (name, default).
SIGNATURES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add": ("input", "other", ("alpha", 1)),
        "sub": ("input", "other", ("alpha", 1)),
        "mul": ("input", "other"),
        "div": ("input", "other", ("rounding_mode", None)),
        "pow": ("input", "exponent"),
        "matmul": ("input", "other"),
        **dict.fromkeys(("neg", "rsqrt", "sqrt", "square", "reciprocal", "sigmoid", "tanh", "erf", "exp"), ("input",)),
        "not": ("input",),
        **dict.fromkeys(("eq", "ne", "le", "ge", "and", "or"), ("input", "other")),
        "tril": ("input", ("diagonal", 0)),
        "triu": ("input", ("diagonal", 0)),
        **dict.fromkeys(("silu", "relu"), ("input", ("inplace", False))),
        "softplus": ("input", ("beta", 1), ("threshold", 20)),
        "gelu": ("input", ("approximate", "none")),
        "mean": ("input", ("dim", None), ("keepdim", False), ("dtype", None)),
        "sum": ("input", ("dim", None), ("keepdim", False), ("dtype", None)),
        # `correction` is only ever given by name, in place of `unbiased`.
        "var": ("input", ("dim", None), ("unbiased", True), ("keepdim", False), ("correction", None)),
        "cat": ("tensors", ("dim", 0)),
        "stack": ("tensors", ("dim", 0)),
        "chunk": ("input", "chunks", ("dim", 0)),
        "split": ("input", "size", ("dim", 0)),
        "getitem": ("input", "index"),
        "unflatten": ("input", "dim", "sizes"),
        "transpose": ("input", "dim0", "dim1"),
        "linear": ("input", "weight", ("bias", None)),
        "addmm": ("input", "mat1", "mat2", ("beta", 1), ("alpha", 1)),
        "fused_attention": (
            *("query", "key", "value", ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False)),
            *(("scale", None), ("enable_gqa", False)),
        ),
        "softmax": ("input", ("dim", None), ("_stacklevel", 3), ("dtype", None)),
        "softmax_method": ("input", "dim", ("dtype", None)),
        "dropout": ("input", ("p", 0.5), ("training", True), ("inplace", False)),
        "masked_fill": ("input", "mask", "value"),
        "where": ("condition", "input", "other"),
        "rms_norm": ("input", "normalized_shape", ("weight", None), ("eps", None)),
        "layer_norm": ("input", "normalized_shape", ("weight", None), ("bias", None), ("eps", 1e-5)),
        "cross_entropy": (
            *("input", "target", ("weight", None), ("size_average", None), ("ignore_index", -100), ("reduce", None)),
            *(("reduction", "mean"), ("label_smoothing", 0.0)),
        ),
    }
)

# How each is spelled: functions, operators, and names of methods.
_SPELLINGS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add": (operator.add, torch.add, "add"),
        "sub": (operator.sub, torch.sub, torch.subtract, "sub"),
        "mul": (operator.mul, torch.mul, torch.multiply, "mul", "multiply"),
        "div": (operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide"),
        "pow": (operator.pow, torch.pow, "pow"),
        "matmul": (operator.matmul, torch.matmul, torch.bmm, torch.mm, "matmul", "bmm", "mm"),
        "neg": (operator.neg, torch.neg, torch.negative, "neg"),
        "rsqrt": (torch.rsqrt, "rsqrt"),
        "sqrt": (torch.sqrt, "sqrt"),
        "square": (torch.square, "square"),
        "reciprocal": (torch.reciprocal, "reciprocal"),
        "sigmoid": (torch.sigmoid, torch.special.expit, F.sigmoid, "sigmoid"),
        "tanh": (torch.tanh, F.tanh, "tanh"),
        "erf": (torch.erf, torch.special.erf, "erf"),
        "exp": (torch.exp, "exp"),
        "not": (operator.invert, operator.inv, torch.logical_not, torch.bitwise_not, "logical_not", "bitwise_not"),
        # Methods with underscores: torch 2.11 writes comparisons so.
        "eq": (operator.eq, torch.eq, "eq", "__eq__"),
        "ne": (operator.ne, torch.ne, "ne", "__ne__"),
        "le": (operator.le, torch.le, torch.less_equal, "le", "__le__"),
        "ge": (operator.ge, torch.ge, torch.greater_equal, "ge", "__ge__"),
        "and": (operator.and_, torch.bitwise_and, torch.logical_and, "__and__"),
        "or": (operator.or_, torch.bitwise_or, torch.logical_or, "__or__"),
        "tril": (torch.tril, "tril"),
        "triu": (torch.triu, "triu"),
        "silu": (F.silu,),
        "relu": (F.relu, torch.relu, "relu"),
        "softplus": (F.softplus,),
        "gelu": (F.gelu, nn_gelu),
        "mean": (torch.mean, "mean"),
        "sum": (torch.sum, "sum"),
        "var": (torch.var, "var"),
        "cat": (torch.cat, torch.concat, torch.concatenate),
        "stack": (torch.stack,),
        "chunk": (torch.chunk, "chunk"),
        "split": (torch.split, "split"),
        "getitem": (operator.getitem,),
        "unflatten": (torch.unflatten, "unflatten"),
        "transpose": (torch.transpose, torch.swapaxes, "transpose", "swapaxes"),
        "linear": (F.linear, nn_linear),
        "addmm": (torch.addmm, "addmm"),
        "fused_attention": (F.scaled_dot_product_attention,),
        "softmax": (F.softmax,),
        "softmax_method": (torch.softmax, "softmax"),
        "dropout": (F.dropout,),
        "masked_fill": (torch.masked_fill, "masked_fill"),
        "where": (torch.where,),
        "rms_norm": (F.rms_norm, torch.rms_norm),
        "layer_norm": (F.layer_norm,),
        "cross_entropy": (F.cross_entropy,),
    }
)
KINDS = MappingProxyType({target: kind for kind, targets in _SPELLINGS.items() for target in targets})

# Calls that change the dtype alone (what they make is read off the value), and those that change the shape alone.
CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
RESHAPES = frozenset({"view", "reshape", "flatten", torch.reshape, torch.flatten, "unsqueeze", torch.unsqueeze})

# Other names under which torch takes an argument.
ALIASES = MappingProxyType({"axis": "dim", "keepdims": "keepdim", "split_size_or_sections": "size", "self": "input"})

# Operators that write to their first argument.
WRITING_OPERATORS = frozenset(
    {
        *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.imatmul),
    }
)
# Operators whose names end in an underscore because of a keyword; other such names are those of calls that write.
KEYWORD_OPERATORS = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})
