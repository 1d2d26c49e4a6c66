"""Runs a program: on one of several ranks with dsgraph, or for all ranks in one process without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import dsgraph
from tests.trials.programs.program import Batch, Program, Step

# What a rank notes: a name that says where, the value, and whether the value is this rank's rows alone.
# As an array: torch would send a tensor as memory that ends with its process.
Note = tuple[str, Any, bool]


class CaughtError(Exception):
    """Raised in a forward or a loss; the program catches it and goes on."""


class OwnError(Exception):
    """Raised by the program of one rank, which ends by it."""


class Net(nn.Module):
    """Blocks, an optional tower, experts chosen in Python, two heads."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width, bias = program.width, program.bias
        self.breaks = program.breaks
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(2))
        self.tower = nn.Linear(width, width, bias)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(program.experts))
        self.heads = nn.ModuleList(nn.Linear(width, outputs, bias) for outputs in program.outputs)
        if program.frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor, head: int, expert: int, tower: bool, depth: int, repeats: int, raises: bool) -> Tensor:
        for block in self.blocks[:depth]:
            for _ in range(repeats):
                x = torch.tanh(block(x))
        if tower:
            x = x + torch.tanh(self.tower(x))
        if self.breaks:
            torch._dynamo.graph_break()
        if len(self.experts):
            x = x + torch.tanh(self.experts[expert](x))
        if raises:
            raise CaughtError("in the forward")
        out: Tensor = self.heads[head](x)
        return out


def optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    if program.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.3, momentum=0.9, weight_decay=0.01)
    # The large eps keeps rounding errors of gradients near zero small.
    return torch.optim.AdamW(trained, lr=0.05, eps=1e-3)


def loss_of(run: Callable[..., Tensor], program: Program, batch: Batch, *where: int) -> Tensor:
    """Return the loss of a micro-batch; `where` is its step, its number and its rank."""
    loss: Any = 0
    for number, call in enumerate(batch.calls):
        seed = 1 + sum(each * factor for each, factor in zip((*where, number), (1000, 100, 10, 1), strict=True))
        x = torch.randn(2, program.width, generator=torch.Generator().manual_seed(seed))
        loss = loss + run(x, **asdict(call)).square().mean()
    if batch.fails:
        raise CaughtError("in the loss")
    return loss  # type: ignore[no-any-return]


@dataclass
class Twin:
    """One process that does what all ranks do: gradients are means over ranks of each rank's sum."""

    program: Program
    notes: list[dict[str, Tensor]] = field(default_factory=list)

    def run(self) -> list[dict[str, Tensor]]:
        """Return the notes of each rank, which hold whole parameters."""
        program = self.program
        torch.manual_seed(program.seed)
        model = Net(program)
        optimizer = optimizer_of(program, model)
        self.notes = [{} for _ in range(program.world)]
        for number in range(max(map(len, program.ranks))):
            steps = {rank: steps[number] for rank, steps in enumerate(program.ranks) if number < len(steps)}
            for rank, step in steps.items():
                self._run_batches(model, number, rank, step)
            if any(step.end == "step" for step in steps.values()):
                if program.clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            optimizer.zero_grad()
            for rank in steps:
                for name, param in model.named_parameters():
                    self.notes[rank][f"step {number}, {name}"] = param.detach().clone()
        return self.notes

    def _run_batches(self, model: Net, number: int, rank: int, step: Step) -> None:
        for index, batch in enumerate(step.batches):
            with torch.set_grad_enabled(batch.does != "evaluate"):
                try:
                    loss = loss_of(model, self.program, batch, number, index, rank)
                except CaughtError:
                    continue
                if batch.does == "train":
                    (loss / self.program.world).backward()
            self.notes[rank][f"step {number}, batch {index}, loss"] = loss.detach().clone()
            if step.crashes:
                return


@dataclass
class Rank:
    """One rank of a program.

    Attributes:
        program: What is run.
        rank: Number of this rank.
        tell: Called with what the rank is about to do.
        notes: Losses, and the rows of parameters after each step.
    """

    program: Program
    rank: int
    tell: Callable[[str], None]
    notes: list[Note] = field(default_factory=list)

    def run(self) -> None:
        program = self.program
        self.tell("partition")
        torch.manual_seed(program.seed)
        model = dsgraph.partition(Net(program), stage=program.stage, keep_whole_below=program.keep_whole_below)
        run = _compiled(model, program.compiles)
        optimizer = optimizer_of(program, model)
        for number, step in enumerate(program.ranks[self.rank]):
            for index, (batch, around) in enumerate(self._with_accumulate(model, step)):
                self.tell(f"step {number}, batch {index}, {batch.does}")
                with around:
                    self._run_batch(run, batch, number, index)
                if step.crashes:
                    raise OwnError("a fault of this rank's own program")
            self.tell(f"step {number}, {step.end}")
            self._end(model, optimizer, step)
            for name, param in model.named_parameters():
                self._note(f"step {number}, {name}", param)

    def _with_accumulate(self, model: nn.Module, step: Step) -> Iterator[tuple[Batch, AbstractContextManager[Any]]]:
        trained = [index for index, batch in enumerate(step.batches) if batch.does != "evaluate"]
        last = max(trained, default=0)
        for index, batch in enumerate(step.batches):
            is_inside = self.program.accumulates and index < last
            yield batch, dsgraph.accumulate(model) if is_inside else nullcontext()

    def _run_batch(self, run: Callable[..., Tensor], batch: Batch, *where: int) -> None:
        with torch.set_grad_enabled(batch.does != "evaluate"):
            try:
                loss = loss_of(run, self.program, batch, *where, self.rank)
            except CaughtError:
                return
        if batch.does == "train":
            self.tell("step {}, batch {}, backward".format(*where))
            loss.backward()
        self._note("step {}, batch {}, loss".format(*where), loss)

    def _end(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> None:
        if step.end == "step":
            if self.program.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        elif step.end == "discard":
            dsgraph.discard(model)
        optimizer.zero_grad()

    def _note(self, name: str, value: Tensor) -> None:
        is_rows = False
        if isinstance(value, DTensor):
            is_rows = any(isinstance(each, Shard) for each in value.placements)
            value = value.to_local()
        self.notes.append((name, value.detach().clone().numpy(), is_rows))


def _compiled(model: Net, how: str) -> Callable[..., Tensor]:
    options = {"codegen": "eager"}
    if how == "whole":
        return torch.compile(model, backend="dsgraph", options=options)
    if how == "parts":
        for part in (*model.blocks, model.tower, *model.experts, *model.heads):
            part.compile(backend="dsgraph", options=options)
    return model
