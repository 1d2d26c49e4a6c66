"""Detection of `param.data = tensor` on `model.parameters()`: torch accepts it, but the shard keeps its rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.dtensor import identity_of_parts
from dsgraph.utils.errors import PartitionError

# On a shard: what it was seen with.
_SEEN = "_dsgraph_memory"


def refuse_replaced_data(param: Any, name: str) -> None:
    """Refuse a shard whose `.data` has been replaced since it was last checked.

    Such a write replaces the wrapper and leaves the rows, which are a separate tensor. If torch replaces both, as
    `model.to(dtype)` does, nothing is wrong.

    Args:
        param: The parameter as its module holds it.
        name: Its name in the error.

    Raises:
        PartitionError: It names the parameter and what to write instead.
    """
    if not isinstance(param, DTensor):
        return
    now = identity_of_parts(param)
    seen: tuple[int, int] = param.__dict__.get(_SEEN, now)
    if now[0] != seen[0] and now[1] == seen[1]:
        raise PartitionError(
            f"parameter {name!r}: its .data was replaced, which does not reach the shards, so that it has its old "
            "value: write into it, param.data.copy_(...), or to the attribute, model.layer.weight.data = ..."
        )
    param.__dict__[_SEEN] = now


def forget_memory(param: Tensor) -> None:
    """Forget the memory that a parameter was seen with; for copies."""
    param.__dict__.pop(_SEEN, None)
