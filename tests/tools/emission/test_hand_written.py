"""Every hand-written Triton kernel compiles for each architecture and dtype, and none but those of `SPILLS` spills.

The exception: norms of long rows, which a program holds whole: the backward from 8,192 elements on, where RMSNorm
spills some 100 and LayerNorm some 150 bytes a thread, the forward beyond 8,192.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import triton
import triton.language as tl

from dsgraph.inductor_ext import kernels, quant
from dsgraph.inductor_ext.kernels.cross_entropy_rows import MAX_BLOCK, WARPS
from dsgraph.inductor_ext.kernels.launch import warps_for
from dsgraph.passes.analysis.hardware import GPUS
from dsgraph.tools.emission.kernels import Resources

from .compiling import compile_triton

pytestmark = pytest.mark.inductor

ARCHS = (*GPUS, "sm_100")
DTYPES = ("bf16", "fp16", "fp32")
# Pointers to what is always float32, or to integers; all others are to the dtype of the model.
_POINTERS = {
    **dict.fromkeys(("rstd_ptr", "mean_ptr", "dweight_ptr", "dbias_ptr", "losses", "row_weights"), "*fp32"),
    **dict.fromkeys(("target", "seed_ptr"), "*i64"),
    **dict.fromkeys(("kept_ptr", "mask_ptr"), "*i1"),
    **{"filled_ptr": "*i64", "packed_ptr": "*u8", "least_ptr": "*fp32", "scale_ptr": "*fp32", "signs_ptr": "*u8"},
}
_TENSORS = {"logits"}
_FLOATS = {
    *("eps", "offset", "sign", "label_smoothing", "z_loss", "softcap", "logit_scale", "p", "scale"),
}

# Kernel -> its constants and warps, as its launcher chooses them: rows of 4,096 and 8,192 elements, heads of 128.
# "dtype" stands for that of the model; a pointer among the constants has this type whatever the dtype.
_ROWS = (4096, 8192)
_SCALED = {"HAS_WEIGHT": True, "ROUND_TO": "dtype"}
_ROUNDED = {**_SCALED, "PRODUCT": "dtype"}
_SHIFTED = {"HAS_WEIGHT": True, "HAS_BIAS": True}
_WHOLE = {"FULL_COS": True, "FULL_SIN": True}
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
        ({"HAS_BIAS": True, "HAS_SCALE": True, "ROWS": rows, "BLOCK_N": 16, "BLOCK_K": 128, **weight}, 4)
        for rows in (1, 16)
        for weight in ({}, {"weight_ptr": "*i8"})
    ],
    ("skinny_groups", "groups_kernel"): [({"ROWS": rows, "BLOCK_N": 16, "HALF": 64}, 4) for rows in (1, 16)],
    ("cross_entropy_rows", "cross_entropy_rows_kernel"): [(_LARGEST, WARPS)],
    ("signs", "pack_kernel"): [({"x_ptr": "*fp32", "BLOCK": 1024}, 4)],
    ("signs", "unpack_kernel"): [({"result_ptr": "*fp32", "BLOCK": 1024}, 4)],
}
SPILLS = {
    **{("skinny_groups", "fp32", arch): 424 for arch in ARCHS},  # of 16 rows
    **{("skinny_linear", "fp32", arch): 284 for arch in ARCHS},
    **{("layer_norm", dtype, "sm_100"): 12 for dtype in ("bf16", "fp16")},
}
"""File of a kernel, dtype and architecture -> bytes of registers that spill at most; all others spill none."""


def _of_kernels() -> list[Any]:
    """Each Triton function of an op that is launched as it is, with the file that defines it."""
    found = []
    for item in [*_files(kernels), *_files(quant)]:
        module = importlib.import_module(item)
        for name, value in vars(module).items():
            if (
                isinstance(value, triton.JITFunction)
                and name.endswith("_kernel")
                and value.__module__ == module.__name__
            ):
                stem = item.rpartition(".")[2]
                found.append(pytest.param(stem, value, id=f"{stem}-{name}"))
    return found


def _files(package: ModuleType) -> list[str]:
    return [item.name for item in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "kernel"), _of_kernels())
def test_it_compiles_without_spills(name, kernel, arch, dtype):
    for constants, warps in LAUNCHES[name, kernel.__name__]:
        found = _compile(kernel, constants, arch, dtype, warps)
        assert found.spill_bytes <= SPILLS.get((name, dtype, arch), 0), (constants, found)


@pytest.mark.full  # above, kernels compile as they are launched for a model
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), _of_kernels())
def test_each_branch_compiles(name, kernel, dtype):
    (constants, warps), *_ = LAUNCHES[name, kernel.__name__]
    for branch, value in constants.items():
        if isinstance(value, bool):
            _compile(kernel, {**constants, branch: not value}, "sm_90", dtype, warps)


def _compile(kernel: Any, constants: dict[str, Any], arch: str, dtype: str, warps: int) -> Resources:
    types = {argument: _type(argument, dtype) for argument in kernel.arg_names if argument not in constants}
    types.update({name: value for name, value in constants.items() if name.endswith("_ptr")})
    given = {name: _DTYPE[dtype] if value == "dtype" else value for name, value in constants.items()}
    given = {name: value for name, value in given.items() if name not in types}
    return compile_triton(kernel, types, given, arch, num_warps=warps)


_DTYPE = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def _type(argument: str, dtype: str) -> str:
    if argument in _POINTERS:
        return _POINTERS[argument]
    if argument.endswith("_ptr") or argument in _TENSORS:
        return f"*{dtype}"
    return "fp32" if argument in _FLOATS else "i32"
