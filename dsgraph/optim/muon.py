"""Muon beside AdamW: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.utils.errors import ConfigError

from .full_matrix import FullMatrixOptimizer, whole_where_needed
from .hooks import Groups, OptimizerHooks, evaluated


class MuonAndAdamW(OptimizerHooks, Optimizer):
    """Muon for the matrices inside a model, AdamW for everything else, as DeepSpeed's type `Muon`."""

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_steps: int = 5,
        *,
        model: nn.Module,
        muon: Collection[str],
    ) -> None:
        """Create both optimizers.

        Args:
            groups: Groups as for `torch.optim`.
            lr: Default learning rate of both.
            muon_lr: Learning rate of Muon.
            adam_lr: Learning rate of AdamW.
            momentum: Momentum of Muon.
            weight_decay: Weight decay of both.
            betas: Betas of AdamW.
            eps: Epsilon of AdamW.
            ns_steps: Steps of Muon's Newton-Schulz iteration.
            model: The model of these parameters.
            muon: Names of the parameters that Muon updates.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        chosen = {key for key, name in names.items() if name in muon}
        matrices, others = _part(groups, lambda key: key in chosen), _part(groups, lambda key: key not in chosen)
        self._parts: list[Optimizer] = []
        self._is_made = False
        if matrices:
            rate = lr if muon_lr is None else muon_lr
            made = torch.optim.Muon(matrices, lr=rate, momentum=momentum, weight_decay=weight_decay, ns_steps=ns_steps)
            self._parts.append(whole_where_needed(made))
        if others:
            rate = lr if adam_lr is None else adam_lr
            self._parts.append(torch.optim.AdamW(others, lr=rate, betas=betas, eps=eps, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add groups in the constructor, and refuse later ones."""
        if self._is_made:
            raise ConfigError("MuonAndAdamW: groups cannot be added: make a new engine")
        super().add_param_group(param_group)

    def owns(self, param: Tensor) -> bool | None:
        """Return `FullMatrixOptimizer.owns`; None for parameters that AdamW updates."""
        for part in self._parts:
            if isinstance(part, FullMatrixOptimizer) and part.holds(param):
                return part.owns(param)
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers. All ranks call it together."""
        loss = evaluated(closure)
        for part in self._parts:
            part.step()
        return loss


def inner_matrices(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon updates.

    A parameter's attribute `use_muon` decides; without it, matrices that are neither embeddings nor heads.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = set()
    for name, param in model.named_parameters():
        is_inside = id(param) not in embeddings and "embed" not in name and "lm_head" not in name
        if getattr(param, "use_muon", param.dim() == 2 and is_inside):
            found.add(name)
    return found


def _part(groups: Groups, belongs: Callable[[int], bool]) -> Groups:
    """Return the groups with only the parameters that belong, by their id; empty groups are left out."""
    found = [{**group, "params": [param for param in group["params"] if belongs(id(param))]} for group in groups]
    return [group for group in found if group["params"]]
