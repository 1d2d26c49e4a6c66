"""The interface of a trial's script: it partitions and compiles, or runs in one process, and notes results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsgraph

ModelT = TypeVar("ModelT", bound=nn.Module)
CallT = TypeVar("CallT", bound=Callable[..., Any])


class Way(NamedTuple):
    """How a script runs: with a ZeRO stage, compiled or not."""

    stage: int
    compiles: bool

    def __str__(self) -> str:
        return f"stage {self.stage}, {'compiled' if self.compiles else 'uncompiled'}"


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass
class User:
    """Runs a script on this rank; without a way, in this process alone.

    Attributes:
        way: How; None: as if dsgraph were not there.
        notes: What the script wants compared, in order.
    """

    way: Way | None
    notes: list[tuple[str, Tensor]] = field(default_factory=list)

    @property
    def is_alone(self) -> bool:
        return self.way is None

    def partition(self, model: ModelT, **arguments: Any) -> ModelT:
        """`dsgraph.partition`."""
        if self.way is None:
            return model
        return dsgraph.partition(model, stage=self.way.stage, **{"keep_whole_below": 20, **arguments})

    def again(self, model: ModelT) -> ModelT:
        """`dsgraph.partition` of a model that has got something new."""
        return model if self.is_alone else dsgraph.partition(model)

    def compile(self, run: CallT, **options: Any) -> CallT:
        """`torch.compile` of a module or a function."""
        if self.way is None or not self.way.compiles:
            return run
        compiled: Any = torch.compile(run, backend="dsgraph", options={"codegen": "eager", **options})
        return compiled

    def rows(self, *batch: Tensor) -> Any:
        """This rank's rows of a batch; alone, all of them."""
        if not self.is_alone:
            rank, world = dist.get_rank(), dist.get_world_size()
            batch = tuple(each.chunk(world)[rank] for each in batch)
        return batch if len(batch) > 1 else batch[0]

    def numbers(self, step: int, *shape: int) -> Tensor:
        """A batch of random numbers, of which this rank sees its rows."""
        found: Tensor = self.rows(everybody(step, *shape))
        return found

    def loss(self, loss: Any, name: str = "loss") -> None:
        """Notes a mean over the batch: over ranks, where each has its rows."""
        mean = torch.as_tensor(full(loss)).detach().clone()
        if not self.is_alone:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.note(mean, name)

    def note(self, value: Any, name: str = "value") -> None:
        """Notes what must be equal on each rank and in one process."""
        self.notes.append((name, torch.as_tensor(full(value)).detach().clone()))

    def parameters(self, model: nn.Module) -> None:
        """Notes all parameters, and all gradients that there are."""
        for name, param in model.named_parameters():
            self.note(param, name)
            if param.grad is not None:
                self.note(param.grad, f"gradient of {name}")

    def state(self, state: Mapping[str, Any]) -> None:
        """Notes the tensors of a state dict."""
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.note(value, name)


def everybody(step: int, *shape: int) -> Tensor:
    """A batch of random numbers, the same everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + step))


def tokens(step: int, *shape: int, vocabulary: int = 32) -> Tensor:
    """Tokens, the same everywhere."""
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(2000 + step))
