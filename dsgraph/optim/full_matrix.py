"""Optimizers that need full matrices, run on shards: each parameter is complete on one rank, its owner.

Muon orthogonalizes a matrix; only some of its rows have other singular values. So at each step the ranks that share the
rows of a parameter send gradient and rows to its owner, the owner steps, and sends the new rows back. Each direction is
one all-to-all of all parameters. Owners are chosen so that all have about equally much to compute, and only its owner
has the optimizer's state of a parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from dsgraph.inductor_ext import chunk_rows
from dsgraph.partitioning.guards import needs_all_rows
from dsgraph.partitioning.rows import own_part, split_dims
from dsgraph.utils.errors import PartitionError

from .hooks import WrappedOptimizer, evaluated


@dataclass(frozen=True)
class _Share:
    """The sharing of the rows of one parameter.

    Attributes:
        param: The shard.
        group: The ranks that share its rows.
        owner: The rank of `group` that computes with the full parameter.
    """

    param: DTensor
    group: dist.ProcessGroup
    owner: int

    @property
    def is_mine(self) -> bool:
        """True if this rank owns it."""
        return self.owner == self.group.rank()

    def rows_of(self, rank: int) -> int:
        """Return the number of rows on a rank of the group."""
        rows, each = self.param.shape[0], chunk_rows(self.param.shape[0], self.group.size())
        return max(0, min(each, rows - rank * each))

    def elements_of(self, rank: int) -> int:
        """Return the number of elements on a rank of the group."""
        return self.rows_of(rank) * math.prod(self.param.shape[1:])


class FullMatrixOptimizer(WrappedOptimizer):
    """A wrapper that steps an optimizer on full parameters. Groups and options are those of the inner optimizer.

    Attributes:
        inner: The optimizer that steps, which holds shards between steps.
    """

    def __init__(self, inner: Optimizer) -> None:
        """Take over an optimizer of shards.

        Args:
            inner: An optimizer that has not stepped.
        """
        super().__init__(inner)
        self._owners: dict[int, int] = {}
        self._sharing()

    def holds(self, param: Tensor) -> bool:
        """Return whether this optimizer updates a parameter."""
        return any(param is held for group in self.param_groups for held in group["params"])

    def owns(self, param: Tensor) -> bool | None:
        """Return whether this rank stores the state of a parameter: its owner does, or all if it is replicated."""
        group = _group_of(param)
        return group is None or self._owners[id(param)] == group.rank()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. All ranks call it together."""
        loss = evaluated(closure)
        held = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        shares = [share for share in self._sharing() if share.param.grad is not None]
        whole = {id(param): _leaf(own_part(param), own_part(param.grad)) for param in held if _group_of(param) is None}
        for together in _by_group(shares):
            for share, weight, grad in _gather(together):
                whole[id(share.param)] = _leaf(weight, grad)
        self._step_inner(whole)
        for together in _by_group(shares):
            _scatter(together, whole)
        torch.autograd.graph.increment_version(held)
        return loss

    def _sharing(self) -> list[_Share]:
        """Return the sharded parameters, each with its owner."""
        split = [param for group in self.param_groups for param in group["params"] if _group_of(param) is not None]
        self._owners = _balanced(split, self._owners)
        return [_Share(param, _group_of(param), self._owners[id(param)]) for param in split]  # type: ignore[arg-type]

    def _step_inner(self, whole: dict[int, Tensor]) -> None:
        """Step the inner optimizer on the full parameters that this rank has."""
        groups = self.inner.param_groups
        held = {id(param): param for group in groups for param in group["params"]}
        self.inner.param_groups = [
            {**group, "params": [whole[id(param)] for param in group["params"] if id(param) in whole]}
            for group in groups
        ]
        for key, tensor in whole.items():
            if held[key] in self.state:
                self.inner.state[tensor] = self.state[held[key]]
        try:
            self.inner.step()
            for key, tensor in whole.items():
                self.state[held[key]] = self.inner.state[tensor]
        finally:
            self.inner.param_groups = groups
            self.inner.state = defaultdict(dict)


def whole_where_needed(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself, or a wrapper if it needs full parameters and holds sharded ones."""
    if not needs_all_rows(optimizer):
        return optimizer
    is_split = any(_group_of(param) is not None for group in optimizer.param_groups for param in group["params"])
    return FullMatrixOptimizer(optimizer) if is_split else optimizer


def _group_of(param: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks over which the rows of a parameter are sharded; None for a replicated one."""
    dims = split_dims(param)
    if not dims:
        return None
    assert isinstance(param, DTensor)
    if len(dims) > 1 or param.placements[dims[0]] != Shard(0):
        raise PartitionError(
            "an optimizer of full matrices, such as Muon, has no rank that could compute with a tensor-parallel "
            f"parameter of shape {list(param.shape)}: choose an element-wise optimizer, or use ZeRO without tensor "
            "parallelism"
        )
    return param.device_mesh.get_group(dims[0])


def _leaf(weight: Tensor, grad: Tensor) -> Tensor:
    leaf = weight.detach()
    leaf.grad = grad
    return leaf


def _balanced(params: Iterable[Tensor], known: Mapping[int, int]) -> dict[int, int]:
    """Return the owner of each parameter: the most expensive first, each to the rank with the least work so far.

    The result is the same on all ranks. Known owners stay, because they have the optimizer's state.
    """
    loads: dict[dist.ProcessGroup, list[int]] = {}
    owners = {}
    for param in sorted(params, key=lambda param: (id(param) in known, _cost(param)), reverse=True):
        group = _group_of(param)
        assert group is not None
        load = loads.setdefault(group, [0] * group.size())
        owners[id(param)] = known.get(id(param), load.index(min(load)))
        load[owners[id(param)]] += _cost(param)
    return owners


def _cost(param: Tensor) -> int:
    """Return the cost of a matrix times its transpose, which dominates Muon's time."""
    return param.numel() * min(param.shape)


def _by_group(shares: Sequence[_Share]) -> list[list[_Share]]:
    """Return groups of parameters that can be sent together: of one group of ranks and one dtype."""
    found: dict[Any, list[_Share]] = defaultdict(list)
    for share in shares:
        found[share.group, share.param.dtype].append(share)
    return list(found.values())


def _exchange(mine: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: _Share) -> list[Tensor]:
    """Send `mine[rank]` to each rank; return what each rank has sent, flat, with the given sizes."""
    local = own_part(like.param)
    flat = [torch.cat([part.reshape(-1) for part in parts]) if parts else local.new_empty(0) for parts in mine]
    received = local.new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(flat), list(sizes), [part.numel() for part in flat], group=like.group)
    return list(received.split(list(sizes)))


def _gather(shares: Sequence[_Share]) -> list[tuple[_Share, Tensor, Tensor]]:
    """Return the full parameters that this rank owns, each with its gradient."""
    ranks = range(shares[0].group.size())
    owned = [share for share in shares if share.is_mine]
    sends = [
        [
            part
            for share in shares
            if share.owner == rank
            for part in (own_part(share.param), own_part(share.param.grad))  # type: ignore[arg-type]
        ]
        for rank in ranks
    ]
    parts = _exchange(sends, [2 * sum(share.elements_of(rank) for share in owned) for rank in ranks], shares[0])
    pieces = [
        part.split([size for share in owned for size in [share.elements_of(rank)] * 2])
        for rank, part in zip(ranks, parts, strict=True)
    ]
    found = []
    for number, share in enumerate(owned):
        weight, grad = (
            torch.cat([piece[2 * number + which] for piece in pieces]).reshape(share.param.shape) for which in (0, 1)
        )
        found.append((share, weight, grad))
    return found


def _scatter(shares: Sequence[_Share], whole: dict[int, Tensor]) -> None:
    """Send the rows of full parameters from their owners to the ranks that store them."""
    ranks = range(shares[0].group.size())
    sends = [[_rows(share, whole[id(share.param)], rank) for share in shares if share.is_mine] for rank in ranks]
    mine = shares[0].group.rank()
    from_each = [[share for share in shares if share.owner == rank] for rank in ranks]
    parts = _exchange(sends, [sum(share.elements_of(mine) for share in theirs) for theirs in from_each], shares[0])
    for theirs, part in zip(from_each, parts, strict=True):
        for share, piece in zip(theirs, part.split([share.elements_of(mine) for share in theirs]), strict=True):
            local = own_part(share.param)
            local.copy_(piece.reshape(local.shape))


def _rows(share: _Share, tensor: Tensor, rank: int) -> Tensor:
    each = chunk_rows(tensor.shape[0], share.group.size())
    return tensor[rank * each : rank * each + share.rows_of(rank)]
