"""`param.data = tensor` of what `model.parameters()` gives: torch takes it, and the rows of the shard stay."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.dtensor import identity_of_parts
from dsgraph.utils.errors import PartitionError

# On a shard: what it was seen with.
_SEEN = "_dsgraph_memory"


def refuse_replaced_data(param: Any, name: str) -> None:
    """Refuses a shard whose `.data` has been replaced since it was last seen.

    Such a write leaves the rows, which are a tensor of their own, and exchanges what is around them. Where torch
    exchanges both, as `model.to(dtype)` does, all is well.

    Args:
        param: The parameter as its module holds it.
        name: What the error calls it.

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
    """Forgets what a parameter was seen with, as of a copy."""
    param.__dict__.pop(_SEEN, None)
