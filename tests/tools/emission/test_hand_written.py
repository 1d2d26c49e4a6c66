"""Every hand-written Triton kernel compiles for each architecture, and none spills registers.

The exception: norms of long rows, which a program holds whole: the backward from 8,192 elements on, where RMSNorm
spills some 100 and LayerNorm some 150 bytes a thread, the forward beyond 8,192.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import triton
import triton.language as tl

from dsgraph.inductor_ext import kernels
from dsgraph.inductor_ext.kernels.cross_entropy_rows import MAX_BLOCK, WARPS
from dsgraph.inductor_ext.kernels.launch import warps_for
from dsgraph.passes.analysis.hardware import GPUS

from .compiling import compile_triton

pytestmark = pytest.mark.inductor

# Pointers to what is always float32, or to integers; all others are to bfloat16.
_POINTERS = {
    **dict.fromkeys(("rstd_ptr", "mean_ptr", "dweight_ptr", "dbias_ptr", "losses", "row_weights"), "*fp32"),
    **dict.fromkeys(("param_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "step_ptr", "scale_ptr", "inf_ptr"), "*fp32"),
    **dict.fromkeys(("target", "seed_ptr"), "*i64"),
    **dict.fromkeys(("kept_ptr", "mask_ptr"), "*i1"),
    **{"filled_ptr": "*i64", "packed_ptr": "*u8", "least_ptr": "*fp32"},
}
_TENSORS = {"logits"}
_FLOATS = {
    *("lr", "beta2", "rest1", "rest2", "log2_beta1", "log2_beta2", "weight_decay"),
    *("eps", "offset", "sign", "label_smoothing", "z_loss", "softcap", "logit_scale", "p", "scale"),
}

# Kernel -> its constants and warps, as its launcher chooses them: rows of 4,096 and 8,192 elements, heads of 128.
_ROWS = (4096, 8192)
_SCALED = {"HAS_WEIGHT": True, "ROUND_TO": tl.bfloat16}
_ROUNDED = {**_SCALED, "PRODUCT": tl.bfloat16}
_SHIFTED = {"HAS_WEIGHT": True, "HAS_BIAS": True}
_WHOLE = {"FULL_COS": True, "FULL_SIN": True}
_EVERYTHING = {**dict.fromkeys(("HAS_COPY", "HAS_SCALE", "HAS_INF", "ADAMW", "MAXIMIZE"), True), "BLOCK": 1024}
_LARGEST = {"HAS_SOFTCAP": True, "WRITES_GRADIENT": True, "BLOCK": MAX_BLOCK}
LAUNCHES: dict[tuple[str, str], list[tuple[dict[str, Any], int]]] = {
    ("rms_norm", "forward_kernel"): [
        ({"HAS_RESIDUAL": add, **_ROUNDED, "BLOCK": row}, warps_for(row)) for add in (False, True) for row in _ROWS
    ],
    ("rms_norm", "backward_kernel"): [
        ({"HAS_GRAD_X": add, **_SCALED, "BLOCK": 4096}, warps_for(4096)) for add in (False, True)
    ],
    ("layer_norm", "forward_kernel"): [
        ({"HAS_RESIDUAL": add, **_SHIFTED, "BLOCK": row}, warps_for(row)) for add in (False, True) for row in _ROWS
    ],
    ("layer_norm", "backward_kernel"): [
        ({"HAS_GRAD_X": add, **_SHIFTED, "BLOCK": 4096}, warps_for(4096)) for add in (False, True)
    ],
    ("swiglu", "forward_kernel"): [({"BLOCK": 1024}, 4)],
    ("swiglu", "backward_kernel"): [({"BLOCK": 1024}, 4)],
    ("geglu", "forward_kernel"): [({"TANH": tanh, "BLOCK": 1024}, 4) for tanh in (False, True)],
    ("geglu", "backward_kernel"): [({"TANH": tanh, "BLOCK": 1024}, 4) for tanh in (False, True)],
    ("bias_gelu", "forward_kernel"): [({"TANH": tanh, "BLOCK": 1024}, 4) for tanh in (False, True)],
    ("bias_gelu", "backward_kernel"): [({"TANH": tanh, "BLOCK": 1024}, 4) for tanh in (False, True)],
    ("softmax_dropout", "forward_kernel"): [({"BLOCK": row, "CALLS": row // 4}, warps_for(row)) for row in _ROWS],
    ("softmax_dropout", "backward_kernel"): [({"BLOCK": row}, warps_for(row)) for row in _ROWS],
    ("rope", "rotate_kernel"): [
        ({"INTERLEAVED": mixed, "TRANSPOSED": back, **_WHOLE, "ROWS": 16, "BLOCK": 64}, 4)
        for mixed in (False, True)
        for back in (False, True)
    ],
    ("decode_attention", "attention_kernel"): [({"GROUP": 4, "D": 128, "BLOCK": 64}, 4)],
    ("skinny_linear", "product_kernel"): [
        ({"HAS_BIAS": True, "HAS_SCALE": True, "ROWS": rows, "BLOCK_N": 16, "BLOCK_K": 128}, 4) for rows in (1, 16)
    ],
    ("skinny_groups", "groups_kernel"): [({"ROWS": rows, "BLOCK_N": 16, "HALF": 64}, 4) for rows in (1, 16)],
    ("cross_entropy_rows", "cross_entropy_rows_kernel"): [(_LARGEST, WARPS)],
}


def _of_kernels() -> list[Any]:
    """Each Triton function in the folder of kernels that is launched as it is, with the file that defines it."""
    found = []
    for item in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(item.name)
        for name, value in vars(module).items():
            if (
                isinstance(value, triton.JITFunction)
                and name.endswith("_kernel")
                and value.__module__ == module.__name__
            ):
                stem = item.name.rpartition(".")[2]
                found.append(pytest.param(stem, value, id=f"{stem}-{name}"))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize(("name", "kernel"), _of_kernels())
def test_it_compiles_without_spills(name, kernel, arch):
    for constants, warps in LAUNCHES[name, kernel.__name__]:
        found = compile_triton(kernel, _types(kernel, constants), constants, arch, num_warps=warps)
        assert found.spill_bytes == 0, found


def _types(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    return {argument: _type(argument) for argument in kernel.arg_names if argument not in constants}


def _type(argument: str) -> str:
    if argument in _POINTERS:
        return _POINTERS[argument]
    if argument.endswith("_ptr") or argument in _TENSORS:
        return "*bf16"
    return "fp32" if argument in _FLOATS else "i32"
