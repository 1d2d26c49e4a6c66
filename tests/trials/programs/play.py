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


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    trained = trained_of(model)
    if program.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.3, momentum=0.9, weight_decay=0.01)
    # The large eps keeps rounding errors of gradients near zero small.
    return torch.optim.AdamW(trained, lr=0.05, eps=1e-3)


class Inside(torch.autograd.Function):
    """A loss whose backward runs another one, as tiled losses and reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss_of: Callable[[], Tensor]) -> Tensor:
        with torch.enable_grad():
            ctx.loss = loss_of()
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.loss.backward(grad)
        return torch.zeros(()), None


def losses_of(run: Callable[..., Tensor], program: Program, batch: Batch, *where: int) -> list[Tensor]:
    """Return the losses of a micro-batch; `where` is its step, its number and its rank."""
    if batch.way == "inside" and torch.is_grad_enabled():
        return [Inside.apply(torch.zeros((), requires_grad=True), lambda: sum(_losses(run, program, batch, *where)))]
    return _losses(run, program, batch, *where)


def take_gradients(losses: list[Tensor], way: str, params: list[nn.Parameter]) -> None:
    """Add the gradients of the sum of losses.

    Args:
        losses: The losses.
        way: "twice": by halves, in two backwards of one graph; "apart": by one backward a loss; "asked for": after
            `torch.autograd.grad` has asked for the gradients of parameters; otherwise by one backward.
        params: The trained parameters.
    """
    if way == "twice":
        (sum(losses) / 2).backward(retain_graph=True)  # type: ignore[union-attr]
        losses = [sum(losses) / 2]  # type: ignore[list-item]
    if way == "asked for":
        torch.autograd.grad(sum(losses), params, retain_graph=True, allow_unused=True)
    for loss in losses if way == "apart" else [sum(losses)]:
        loss.backward()  # type: ignore[union-attr]


def _losses(run: Callable[..., Tensor], program: Program, batch: Batch, *where: int) -> list[Tensor]:
    losses = []
    for number, call in enumerate(batch.calls):
        seed = 1 + sum(each * factor for each, factor in zip((*where, number), (1000, 100, 10, 1), strict=True))
        x = torch.randn(2, program.width, generator=torch.Generator().manual_seed(seed))
        losses.append(run(x, **asdict(call)).square().mean())
    if batch.fails:
        raise CaughtError("in the loss")
    return losses


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
                    losses = losses_of(model, self.program, batch, number, index, rank)
                except CaughtError:
                    continue
                if batch.does == "train":
                    take_gradients([loss / self.program.world for loss in losses], batch.way, trained_of(model))
            self.notes[rank][f"step {number}, batch {index}, loss"] = sum(losses).detach().clone()  # type: ignore
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
    trained: list[nn.Parameter] = field(default_factory=list)

    def run(self) -> None:
        program = self.program
        self.tell("partition")
        torch.manual_seed(program.seed)
        model = dsgraph.partition(Net(program), stage=program.stage, keep_whole_below=program.keep_whole_below)
        run, self.trained = _compiled(model, program.compiles), trained_of(model)
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
                losses = losses_of(run, self.program, batch, *where, self.rank)
            except CaughtError:
                return
        if batch.does == "train":
            self.tell("step {}, batch {}, backward".format(*where))
            take_gradients(losses, batch.way, self.trained)
        self._note("step {}, batch {}, loss".format(*where), sum(losses))  # type: ignore[arg-type]

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
