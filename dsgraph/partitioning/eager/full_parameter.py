"""Parameters as code outside any module's call reads them: the full tensor, which represents the parameter itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsgraph.compat.dynamo import is_tracing
from dsgraph.partitioning.rows import local_rows
from dsgraph.utils.errors import PartitionError

from .full_tensor import FullTensor, plain_of
from .source import Source

_TAKES_PARAMETERS = inspect.unwrap(Optimizer.add_param_group).__code__


class FullParameter(FullTensor):
    """A full parameter whose parameter attributes (`.grad`, `.requires_grad`, hooks) are those of the shards."""

    __slots__ = ()

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """True if `isinstance` accepts it as a parameter: `get_parameter` may return it; see `keep_shard` as well."""
        asking = sys._getframe(2)
        if asking.f_code is nn.Module.__setattr__.__code__:
            return asking.f_locals["name"] in asking.f_locals["self"]._parameters
        return asking.f_code in (nn.Module.register_parameter.__code__, nn.Module.get_parameter.__code__)

    @classmethod
    def over(cls, plain: Tensor, source: Source) -> FullTensor:
        """Return `plain` as a tensor that represents the parameter `source`."""
        self = super().over(plain, source)
        self.__dict__ = source.shards.__dict__  # what users note on a parameter
        return self

    @property
    def data(self) -> Tensor:
        """The same without gradients."""
        return FullTensor.over(self.plain.detach(), self.source)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype not in (self.source.shards.dtype, self.plain.dtype):
            raise PartitionError(
                f"{self.source.name} is {self.source.shards.dtype}; {value.dtype} cannot be written to it, because a "
                "partitioned parameter keeps its dtype: convert the model before dsgraph.partition, or pass param_dtype"
            )
        shards = self.source.shards
        self.source.store(plain_of(value).detach().to(device=shards.device, dtype=shards.dtype, copy=True))

    @property
    def grad(self) -> Tensor | None:
        """The full gradient, averaged over ranks; all ranks read it together."""
        grad = self.source.shards.grad
        if grad is None or is_tracing():
            return None
        source = self._source_of(grad)
        return FullTensor.over(source.plain, source)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        shards = self.source.shards
        if value is None:
            shards.grad = None
            return
        grad = torch.zeros_like(shards, requires_grad=False)
        self._source_of(grad).store(plain_of(value).detach().to(grad.dtype, copy=True))
        shards.grad = grad

    @grad.deleter
    def grad(self) -> None:
        self.source.shards.grad = None

    def _source_of(self, grad: Tensor) -> Source:
        shards, source = grad.detach(), self.source
        assert isinstance(grad, DTensor) and isinstance(shards, DTensor)
        read = shards.full_tensor
        return Source(f"the gradient of {source.name}", grad, read(), source.spec, source.partition, read)

    @property
    def requires_grad(self) -> bool:
        """True if the parameter is trained."""
        if is_tracing():
            return self.plain.requires_grad
        return self.source.shards.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.source.shards.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Train or freeze the parameter."""
        self.source.shards.requires_grad_(requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True, as for every parameter; an optimizer that asks is refused."""
        if sys._getframe(1).f_code is _TAKES_PARAMETERS:
            self._refuse("an optimizer was given {}, read as an attribute, of which it would update a copy")
        return not is_tracing() or self.plain.is_leaf

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        """None, as for every parameter."""
        return None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call `hook` with the full gradient, averaged over ranks, in every backward."""
        spec, partition = self.source.spec, self.source.partition

        def on_shards(grad: Any) -> Tensor | None:
            changed = hook(grad.full_tensor())
            if changed is None:
                return None
            rows = local_rows(changed.to(grad.dtype), spec, partition.mesh)
            return partition.distributed(rows, spec, shape=grad.shape, stride=grad.stride())

        return self.source.shards.register_hook(on_shards)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Refuse the hook: it would be called with the parameter itself."""
        self._refuse("a hook that is called when a gradient was accumulated is given the parameter itself, not {}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return an independent parameter with the same values."""
        memo[id(self)] = copied = nn.Parameter(self.plain.detach().clone(), requires_grad=self.requires_grad)
        return copied

    def _refuse(self, what: str) -> NoReturn:
        raise PartitionError(
            f"{what.format(self.source.name)}: take the parameter itself, from model.parameters() or "
            "dict(model.named_parameters())"
        )


def keep_shard(module: Any, name: str, param: object) -> Any:
    """Let a module keep its shard when it is assigned the parameter that it holds, as by transformers' `tie_weights`.

    Torch calls it when a parameter is registered.

    Raises:
        PartitionError: The module does not hold that parameter under this name.
    """
    if type(param) is not FullParameter:
        return None
    if module._parameters.get(name) is not param.source.shards:
        raise PartitionError(
            f"{param.source.name} cannot be registered in a module ({type(module).__name__}, as {name!r}): "
            "torch.nn.utils.prune and what ties parameters come before dsgraph.partition"
        )
    return param.source.shards
