"""The parameters that an optimizer updates, kept by name across `partition`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.optim.hooks import Groups
from dsgraph.utils.errors import ConfigError


class Binding:
    """The parameters that an optimizer updates, by name, kept across `partition`."""

    def __init__(self, model: nn.Module, wanted: Iterable[Any] | None) -> None:
        """Store the names of the parameters.

        Args:
            model: The model, not yet partitioned.
            wanted: Parameters, or groups as `torch.optim` takes them; None: all that are trained.

        Raises:
            ConfigError: One of them is no parameter of the model.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        if wanted is None:
            wanted = [param for param in model.parameters() if param.requires_grad]
        items = list(wanted)
        groups = items if items and isinstance(items[0], Mapping) else [{"params": items}]
        self._groups = [
            {**group, "params": [_name(param, names) for param in _listed(group["params"])]} for group in groups
        ]

    def groups(self, model: nn.Module) -> Groups:
        """Return the groups with the parameters that the model has now."""
        params = dict(model.named_parameters())
        return [{**group, "params": [params[name] for name in group["params"]]} for group in self._groups]

    def named(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """Return the parameters that the model has now, with their names."""
        params = dict(model.named_parameters())
        return [(name, params[name]) for group in self._groups for name in group["params"]]


def parameters_in(wanted: Iterable[Any]) -> Iterator[Any]:
    """Yield each parameter of an argument of `torch.optim`: parameters, pairs of name and parameter, or groups."""
    for item in wanted:
        if isinstance(item, Mapping):
            yield from parameters_in(_listed(item["params"]))
        else:
            yield item[1] if isinstance(item, tuple) else item


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _name(param: object, names: Mapping[int, str]) -> str:
    if isinstance(param, tuple):  # of named_parameters
        param = param[1]
    if id(param) not in names:
        what = tuple(param.shape) if isinstance(param, Tensor) else repr(param)
        raise ConfigError(f"initialize: the optimizer has {what}, which is not a parameter of the model")
    return names[id(param)]


@contextmanager
def rebound(optimizer: Optimizer | None, model: nn.Module) -> Iterator[None]:
    """Empty a caller's optimizer inside the block, and give it the shards of its parameters afterwards.

    Raises:
        ConfigError: The optimizer has stepped already, or holds parameters of something else.
    """
    if optimizer is None:
        yield
        return
    if optimizer.state:
        raise ConfigError(
            f"initialize: {type(optimizer).__name__} has stepped already, and its state is for full parameters: pass a "
            "new one, and load its state from a checkpoint"
        )
    held = [list(group["params"]) for group in optimizer.param_groups]
    binding = Binding(model, [{"params": params} for params in held])
    for group in optimizer.param_groups:
        group["params"] = []
    try:
        yield
        held = [group["params"] for group in binding.groups(model)]
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params
