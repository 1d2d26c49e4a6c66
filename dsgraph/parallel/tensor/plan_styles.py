"""Styles of a user's tensor-parallel plan, with the names that transformers and DTensor have for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import PartitionError

# Style -> number of equal pieces of the sharded dimension, as in `gate_up_proj`.
_COLUMN: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("colwise", "column", "colwise_rep", "colwise_gather_output", "local_colwise"), 1)
    | {"packed_colwise": 2}
)
_ROW: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("rowwise", "row", "rowwise_rep", "rowwise_split_input", "local_rowwise"), 1)
    | {"packed_rowwise": 2, "local_packed_rowwise": 2}
)
_EMBEDDING: Mapping[str, int] = MappingProxyType({"embedding_rowwise": 0, "embedding_colwise": 1})
# Parameters stay replicated. Hooks that transformers adds for these styles sum and gather; here the graph does.
_REPLICATED = (
    *("replicate", "replicated_with_grad_allreduce", "local_params", "local", "gather", "all_reduce"),
    *("mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert"),
)
_EXPERTS = (
    "which gives each rank some experts. tensor_parallel gives each rank a slice of every expert: use 'packed_colwise' "
    "for gate_up_proj and 'rowwise' for down_proj, or plan='auto'"
)
_REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("grouped_gemm", "ep_dispatch_experts", "ep_router"), _EXPERTS)
    | {"sequence_parallel": "but a plan only shards parameters: remove it, and compile with sequence_parallel=True"}
)


def slices_of_module(pattern: str, style: object, *, name: str, module: nn.Module) -> dict[str, Slice | None]:
    """Return the slices of a module's parameters.

    Args:
        pattern: The key of the plan, for errors.
        style: Its value.
        name: The module's name.
        module: The module.

    Returns:
        Name of a parameter -> its slice; None: it is replicated.

    Raises:
        PartitionError: The style is unknown or not supported, or the module has no matrix.
    """
    known = _checked(pattern, style)
    if known in _REPLICATED:
        own = module.named_parameters(prefix=name, recurse=False) if known == "replicate" else ()
        return {parameter: None for parameter, _ in own}
    weight, bias = (module._parameters.get(attribute) for attribute in ("weight", "bias"))
    if weight is None or weight.dim() != 2:
        raise PartitionError(
            f"plan[{pattern!r}] is {known!r}, but module {name!r} ({type(module).__name__}) has no weight of two "
            "dimensions: name linear layers and embeddings"
        )
    if known in _EMBEDDING:
        return {f"{name}.weight": Slice(_EMBEDDING[known])}
    # An embedding is `[rows, width]`, a `Conv1D` of transformers `[inputs, outputs]`.
    outputs = 1 if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" else 0
    if known in _ROW:
        return {f"{name}.weight": Slice(1 - outputs, _ROW[known])}
    found: dict[str, Slice | None] = {f"{name}.weight": Slice(outputs, _COLUMN[known])}
    return found if bias is None else {**found, f"{name}.bias": Slice(0, _COLUMN[known])}


def slice_of_parameter(pattern: str, style: object, *, parameter: nn.Parameter) -> Slice | None:
    """Return the slice of a parameter that a plan names: `[..., outputs, inputs]`, or a vector of outputs.

    Args:
        pattern: The key of the plan, for errors.
        style: Its value.
        parameter: The parameter.

    Raises:
        PartitionError: The style is unknown or not supported.
    """
    known, dims = _checked(pattern, style), parameter.dim()
    if known in _REPLICATED:
        return None
    if known in _EMBEDDING:
        return Slice(_EMBEDDING[known])
    return Slice(dims - 1, _ROW[known]) if known in _ROW else Slice(max(dims - 2, 0), _COLUMN[known])


def _checked(pattern: str, style: object) -> str:
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return "rowwise" if isinstance(style, RowwiseParallel) else "colwise"
    if isinstance(style, str) and style in _REFUSED:
        raise PartitionError(f"plan[{pattern!r}] is {style!r}, {_REFUSED[style]}")
    if isinstance(style, str) and any(style in known for known in (_COLUMN, _ROW, _EMBEDDING, _REPLICATED)):
        return style
    raise PartitionError(
        f"plan[{pattern!r}] is {style!r}; it takes ColwiseParallel() and RowwiseParallel() of "
        f"torch.distributed.tensor.parallel, or {', '.join([*_COLUMN, *_ROW, *_EMBEDDING, *_REPLICATED])}"
    )
