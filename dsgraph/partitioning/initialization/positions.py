"""`extend_positions`: tables of position embeddings for longer sequences."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.utils.errors import PositionsError

ModelT = TypeVar("ModelT", bound=nn.Module)

_NAMES = ("position_embeddings", "wpe", "embed_positions", "position_embedding")
_SIZES = ("max_position_embeddings", "n_positions")
_BUFFERS = ("position_ids", "token_type_ids")


def extend_positions(model: ModelT, length: int) -> ModelT:
    """Extend a model's table of position embeddings, in place, before it is partitioned or compiled.

    The existing rows are repeated, as Beltagy et al. (arXiv 2004.05150) do to start from a short model: a trained model
    sees positions that it knows. Rows before the first position, as RoBERTa has for padding, are not repeated. Models
    without a table, such as those with rotary embeddings, support any length: only their configuration is changed.

    Args:
        model: A model of transformers, or one that has an `nn.Embedding` of one of the names position_embeddings, wpe,
            embed_positions and position_embedding.
        length: Tokens of a sequence.

    Returns:
        `model` itself.

    Raises:
        PositionsError: There is no table and no configuration, the table is long enough already, or the model is
            partitioned; nothing was changed.
    """
    config = getattr(model, "config", None)
    sizes = [name for name in _SIZES if isinstance(getattr(config, name, None), int)]
    tables = _tables(model)
    if not tables and not sizes:
        raise PositionsError(
            f"extend_positions: {type(model).__name__} has no table of positions (an nn.Embedding called "
            f"{', '.join(_NAMES)}) and no config with {' or '.join(_SIZES)}"
        )
    plans = [(holder, name, _offset(table)) for holder, name, table in tables]
    for holder, name, offset in plans:
        table = getattr(holder, name)
        if isinstance(table.weight, DTensor):
            raise PositionsError("extend_positions: the model is already partitioned: call it before `partition`")
        if table.num_embeddings - offset >= length:
            raise PositionsError(
                f"extend_positions: length is {length}, and {name} has {table.num_embeddings - offset} positions "
                "already"
            )
    for holder, name, offset in plans:
        setattr(holder, name, _longer(getattr(holder, name), length, offset))
        _extend_buffers(holder, length + offset)
    offset = max((offset for *_, offset in plans), default=0)
    for name in sizes:
        setattr(config, name, max(getattr(config, name), length + offset))
    return model


def _tables(model: nn.Module) -> list[tuple[nn.Module, str, nn.Embedding]]:
    return [
        (holder, name, child)
        for holder in model.modules()
        for name, child in holder.named_children()
        if name in _NAMES and isinstance(child, nn.Embedding)
    ]


def _offset(table: nn.Embedding) -> int:
    """Return the number of rows before that of the first position."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _longer(table: nn.Embedding, length: int, offset: int) -> nn.Embedding:
    old = table.weight.detach()
    places = torch.arange(length, device=old.device) % (len(old) - offset) + offset
    rows = torch.cat([old[:offset], old[places]])
    made = nn.Embedding(len(rows), old.shape[1], padding_idx=table.padding_idx, device=old.device, dtype=old.dtype)
    made.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
    return made


def _extend_buffers(holder: nn.Module, rows: int) -> None:
    """Extend the position numbers and token types that a model keeps beside its table to the same length."""
    for name in _BUFFERS:
        kept: Any = getattr(holder, name, None)
        if isinstance(kept, Tensor) and kept.ndim == 2 and kept.shape[1] < rows:
            more = torch.arange(rows, device=kept.device) if name == "position_ids" else kept[0, :1].expand(rows)
            setattr(holder, name, more.to(kept.dtype).expand(1, -1).clone())
