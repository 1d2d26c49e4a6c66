"""The arguments of `init_inference`, also by DeepSpeed's names, and from a dict."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from dsgraph.utils.errors import InferenceError

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **{"mp_size": 1, "dtype": None, "checkpoint": None, "quantize": None, "max_tokens": None},
        **{"replace_with_kernel_inject": True, "options": None, "verify": True},
    }
)
"""The default of each argument."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SAME = {
    **{"tensor_parallel": "mp_size", "tp": "mp_size", "max_out_tokens": "max_tokens"},
    "kernel_inject": "replace_with_kernel_inject",
}
_NAMES = {
    torch.float32: ("fp32", "float32", "float", "torch.float32"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat", "torch.bfloat16"),
    torch.float16: ("fp16", "float16", "half", "torch.float16"),
}
_FROM_PLAN = "has no effect: slices are found on the captured model; leave it out"
_OTHERS = (
    *("base_dir", "checkpoint_config", "ep_group", "ep_mp_group", "keep_module_on_host", "min_out_tokens", "mpu"),
    *("replace_method", "return_tuple", "save_mp_checkpoint_path", "set_empty_params", "transposed_mode"),
    *("triangular_masking", "tm", "triton_autotune", "use_triton", "enable_cuda_graph"),
)
# Arguments of DeepSpeed's that would say something else here, and what to do.
_REFUSED = {
    **dict.fromkeys(_OTHERS, "has no counterpart: leave it out"),
    **dict.fromkeys(("injection_policy", "injection_policy_tuple", "injection_dict"), _FROM_PLAN),
    **dict.fromkeys(
        ("moe", "ep_size", "moe_experts", "moe_type"), "has no effect: ranks share experts as other layers, by mp_size"
    ),
    "quant": 'is not supported: quantize="int8" or "int4" gives weights few bits',
    "training_mp_size": "has no effect: a checkpoint is read at any slicing; leave it out",
    "zero": "is not supported: all weights are in memory; leave it out",
}


def merged(own: Mapping[str, Any], config: Mapping[str, Any] | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments, under the names of `init_inference`.

    Args:
        own: Name -> given value, for all of `DEFAULTS`.
        config: DeepSpeed's dict; None: there is none.
        others: Arguments with other names.

    Raises:
        InferenceError: Two set the same argument, or one is unknown.
    """
    if config is not None and not isinstance(config, Mapping):
        raise InferenceError(f"init_inference: config is {config!r}; it takes a dict of arguments")
    found = dict(own)
    said = {name: name for name, value in own.items() if value != DEFAULTS[name]}
    for where, given in (("", others), ("config's ", config or {})):
        for name, value in given.items():
            target = _SAME.get(name, name)
            if target not in DEFAULTS:
                raise InferenceError(f"init_inference: {_why_not(where, name)}")
            if target in said:
                raise InferenceError(
                    f"init_inference: {where}{name} and {said[target]} set the same argument: leave one out"
                )
            said[target] = f"{where}{name}"
            found[target] = _tp_size(name, value) if name in ("tensor_parallel", "tp") else value
    found["dtype"] = next((dtype for dtype, names in _NAMES.items() if found["dtype"] in names), found["dtype"])
    return found


def _why_not(where: str, name: str) -> str:
    return f"{where}{name} {_REFUSED[name]}" if name in _REFUSED else f"there is no argument {where}{name!r}"


def _tp_size(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping) or set(value) != {"tp_size"}:
        raise InferenceError(f'init_inference: {name} is {value!r}; it takes {{"tp_size": n}}')
    return value["tp_size"]
