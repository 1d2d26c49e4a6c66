"""Frozen weights of bitsandbytes: their bytes are sharded like any parameter, and each rank keeps all scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dsgraph.partitioning.parameter import ParameterState

from .parameter_transform import ParameterTransform


class QuantizedWeight(ParameterTransform):
    """The attributes of a quantized weight that its layer reads besides the values, such as `quant_state` and `SCB`."""

    is_copied: ClassVar[bool] = True

    def __init__(self, param: Tensor) -> None:
        """Keep the attributes of `param`, but neither another copy of its values nor its module."""
        self.attributes = {name: value for name, value in vars(param).items() if name not in ("CB", "module")}

    def after_gather(self, full: Tensor) -> Tensor:
        """Return the full weight with its attributes."""
        for name, value in self.attributes.items():
            setattr(full, name, value)
        return full


def is_quantized(param: Tensor | None) -> bool:
    """Return True for a weight of bitsandbytes: its values are bytes, whatever its dtype says."""
    return param is not None and not vars(param).keys().isdisjoint(("quant_state", "SCB"))


def keep_quantized(entry: ParameterState, param: Tensor) -> None:
    """Keep what a parameter needs that is a quantized weight, or the bias of a layer with one."""
    module: Any = entry.owners[0][0]
    if is_quantized(param):
        if vars(param).get("SCB", param) is None:  # a forward has moved it
            vars(param).update(SCB=module.state.SCB)
        # On such a CPU the layer would write another form of the weight, which only inference reads.
        vars(module)["support_avx512bf16_for_cpu"] = False
        entry.spec = replace(entry.spec, param_dtype=None, reduce_dtype=None)
        entry.register(QuantizedWeight(param))
        if (state := vars(param).get("quant_state")) is not None:  # torch's checkpoints look for these names
            vars(param).update({name: scale for name, scale in state.as_dict().items() if isinstance(scale, Tensor)})
    elif is_quantized(module._parameters.get("weight")) and getattr(module, "compute_dtype", None) is not None:
        entry.spec = replace(entry.spec, param_dtype=module.compute_dtype)  # else the layer would convert it in place


def scales_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the scales of the quantized weights of a module, by names of ours."""
    found: dict[str, Tensor] = {}
    for name, param in module._parameters.items():
        state = getattr(param, "quant_state", None)
        for number, holder in enumerate((param, state, getattr(state, "state2", None))):
            held = {f"{name}.{number}.{key}": getattr(holder, key, None) for key in ("SCB", "absmax", "code", "offset")}
            found |= {key: scale for key, scale in held.items() if isinstance(scale, Tensor)}
    return found


def forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a class; that of `Linear8bitLt` would keep the full weight from call to call."""

    def forward(self: Any, x: Tensor) -> Any:
        from bitsandbytes import MatmulLtState, matmul

        state: Any = MatmulLtState(CB=self.weight, SCB=self.weight.SCB)
        state.threshold, state.has_fp16_weights, state.is_training = self.state.threshold, False, self.training
        self.state.CB = None
        return matmul(x, state.CB, bias=None if self.bias is None else self.bias.to(x.dtype), state=state)

    is_8bit = getattr(kind.forward, "__qualname__", "") == "Linear8bitLt.forward"  # PEFT has a class of this name too
    return forward if is_8bit and kind.forward.__module__.startswith("bitsandbytes") else kind.forward
