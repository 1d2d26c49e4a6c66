"""Models that `partition` does not support, refused by name before anything is changed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dsgraph.compat.autograd import has_hooks
from dsgraph.compat.compiled import is_compiled
from dsgraph.utils.errors import PartitionError

from .transforms.quantized_weight import is_quantized, scales_of

SENT_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
"""Dtypes that the collectives of all backends support."""


def refuse_model(model: object) -> None:
    """Refuse an object that is not a plain module.

    Raises:
        PartitionError: Names what was found.
    """
    if is_compiled(model):
        raise PartitionError("the model is compiled already: call dsgraph.partition first, then torch.compile")
    if not isinstance(model, nn.Module):
        raise PartitionError(f"partition takes a torch.nn.Module, found {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise PartitionError(
                f"{where} is a ScriptModule, whose parameters cannot be replaced; use the Python module"
            )
        if isinstance(module, DistributedDataParallel):
            raise PartitionError(f"{where} averages gradients itself; partition the module inside it")
        if isinstance(module, FullyShardedDataParallel):
            raise PartitionError(
                f"{where} is a FullyShardedDataParallel, which splits parameters itself: partition the module inside "
                "it, before it is wrapped"
            )
        _refuse_embedding(module, where)
        if getattr(module, "lora_magnitude_vector", None) and scales_of(module.base_layer):
            raise PartitionError(f"{where} is DoRA of PEFT over a quantized weight: use LoRA, use_dora=False")


def _refuse_embedding(module: nn.Module, where: str) -> None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.max_norm is not None:
        raise PartitionError(
            f"{where} has max_norm={module.max_norm}: its forward writes to the weight, on each rank to other rows. "
            "Leave max_norm out, and scale what the embedding gives"
        )
    if module.sparse:
        raise PartitionError(
            f"{where} has sparse=True, and sparse gradients cannot be averaged in rows: build it with sparse=False"
        )


def refuse_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters of a kind that cannot be split into shards.

    Raises:
        PartitionError: Names the first such parameter and the reason.
    """
    for name, param in parameters.items():
        reason = _why_not(param)
        if reason is not None:
            raise PartitionError(f"parameter {name!r} {reason}")


def _why_not(param: nn.Parameter) -> str | None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        return "has no shape yet (a lazy module): run one batch through the model first"
    if isinstance(param, DTensor):
        return "is a DTensor already (tensor parallelism, FSDP); partitioning on top of another layout is not supported"
    if type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
        other = "use a plain tensor, or Linear4bit of bitsandbytes for a quantized weight"
        return f"is a {type(param).__name__}, a tensor subclass that cannot be split: {other}"
    if is_quantized(param) and (param.is_meta or not (param.dtype is torch.int8 or vars(param).get("quant_state"))):
        return "is not quantized yet: move the model to its device first; Linear8bitLt needs has_fp16_weights=False"
    if param.layout is not torch.strided:
        return f"has layout {param.layout}; only strided parameters can be split"
    if param.is_complex():
        return f"is complex ({param.dtype}), which reductions do not take; hold real and imaginary part apart"
    if param.dtype not in SENT_DTYPES:
        takes = "hold such values in a buffer, or convert them, as by .to(torch.bfloat16)"
        return f"is of dtype {param.dtype}, which collectives do not take: {takes}, before dsgraph.partition"
    if (
        not param.is_meta
        and param.untyped_storage().nbytes() < param.numel() * param.element_size()
        and not _repeats(param)
    ):
        return "has no memory of its own (its storage was released): load its values before dsgraph.partition"
    if param.grad is not None:
        return "has a gradient, which would be lost: call model.zero_grad() first"
    if has_hooks(param):
        return "has hooks, which would be lost: register them after partition"
    return None


def _repeats(param: nn.Parameter) -> bool:
    """Return True if several elements share memory, as after `expand`."""
    return any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True))


def refuse_hidden_references(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse modules that hold `parameters` outside their attributes, where a shard could not replace them.

    Raises:
        PartitionError: Names the module, the attribute and the parameter.
    """
    names = {id(param): name for name, param in parameters.items()}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # its flat list is rebuilt from attributes, see `_class_for`
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for item in _contents(value):
                if id(item) in names:
                    raise PartitionError(
                        f"module {module_name!r} ({type(module).__name__}) holds parameter {names[id(item)]!r} in its "
                        f"attribute {attribute!r} as well, and would go on using the unpartitioned tensor from there: "
                        "read it as an attribute in forward instead"
                    )


def _contents(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set, frozenset)) else (value,)


def refuse_early_optimizers(parameters: Iterable[nn.Parameter], *, doing: str) -> None:
    """Refuse to replace parameters that an existing optimizer holds: it would continue to update the old ones.

    Raises:
        PartitionError: Names the optimizer's class.
    """
    for optimizer, count in early_optimizers(parameters):
        raise PartitionError(
            f"{type(optimizer).__name__} was made before {doing} and holds {count} of the model's parameters, "
            f"which {doing} replaces. Make the optimizer after {doing}, and delete this one."
        )


def early_optimizers(parameters: Iterable[nn.Parameter]) -> list[tuple[Optimizer, int]]:
    """Return the existing optimizers that hold some of the parameters, each with their number."""
    wanted = {id(param) for param in parameters}

    def held(optimizer: Optimizer) -> int:
        groups = getattr(optimizer, "param_groups", ())  # none: the collector is about to delete it
        return sum(id(param) in wanted for group in groups for param in group["params"])

    # `type`, not `isinstance`: some objects answer to `__class__` with code of their own.
    optimizers = (found for found in gc.get_objects() if issubclass(type(found), Optimizer))
    return [(optimizer, count) for optimizer in optimizers if (count := held(optimizer))]
