"""Loops, losses, batches, orders of calls."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dsgraph
from tests.trials.models import MLP, square, train
from tests.trials.trial import COMPILED, UNCOMPILED, trial
from tests.trials.user import User, everybody


@trial("a GAN: two models, two optimizers, `detach`, the other one frozen by `requires_grad_`")
def gan(user: User) -> None:
    maker, judge = user.partition(MLP(6, 8, 6)), user.partition(MLP(6, 8, 1))
    make, tell = user.compile(maker), user.compile(judge)
    makers, judges = optim.Adam(maker.parameters(), 0.01), optim.Adam(judge.parameters(), 0.01)
    for step in range(3):
        noise, real = user.numbers(step, 4, 6), user.numbers(100 + step, 4, 6)
        judge.requires_grad_(True)
        loss = F.softplus(-tell(real)).mean() + F.softplus(tell(make(noise).detach())).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        judge.requires_grad_(False)
        fooled = F.softplus(-tell(make(noise))).mean()
        makers.zero_grad()
        fooled.backward()
        makers.step()
        user.loss(loss)
        user.loss(fooled)
    user.parameters(maker)
    user.parameters(judge)


@trial("a gradient penalty on inputs: `autograd.grad(..., create_graph=True)`", ways=UNCOMPILED)
def gradient_penalty(user: User) -> None:
    model = user.partition(MLP(6, 8, 1))
    optimizer = optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        x = user.numbers(step, 4, 6).requires_grad_(True)
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + ((grad.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        user.loss(loss)
    user.parameters(model)


@trial(
    "the same with the model compiled",
    ways=COMPILED,
    refused=r"does not currently support double backward",
)
def gradient_penalty_compiled(user: User) -> None:
    model = user.partition(MLP(6, 8, 1))
    run = user.compile(model)
    x = user.numbers(0, 4, 6).requires_grad_(True)
    (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    grad.norm().backward()


@trial("a teacher that is a `deepcopy`, moved by `p_t.mul_(m).add_(p, alpha=1 - m)`")
def teacher(user: User) -> None:
    model = user.partition(MLP())
    taught = copy.deepcopy(model).requires_grad_(False)
    run, teach = user.compile(model), user.compile(taught)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = user.numbers(step, 4, 6)
        with torch.no_grad():
            target = teach(x)
        loss = F.mse_loss(run(x + 0.1), target) + square(user, run, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(taught.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        user.loss(loss)
    user.parameters(taught)


@trial(
    "a teacher moved by `p_t.data.lerp_(p.data, 1 - m)`, and by `p_t.data.copy_(...)`",
    was="without effect at stages 1 and 2, silently",
)
def teacher_data(user: User) -> None:
    model = user.partition(MLP())
    taught = copy.deepcopy(model)
    teach = user.compile(taught)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        train(user, model, optimizer, steps=1, first=step)
        for slow, fast in zip(taught.parameters(), model.parameters(), strict=True):
            if step % 2:
                slow.data.copy_(slow.data * 0.9 + fast.data * 0.1)
            else:
                slow.data.lerp_(fast.data, 0.3)
        with torch.no_grad():
            user.loss(square(user, teach, 50 + step))
    user.parameters(taught)


@trial(
    "a teacher moved by `p_t.data = m * p_t.data + (1 - m) * p.data`",
    refused=r"its .data was replaced, which does not reach the shards",
    was="without effect, silently",
)
def teacher_replaced(user: User) -> None:
    model = user.partition(MLP())
    taught = copy.deepcopy(model)
    teach = user.compile(taught)
    user.loss(square(user, teach, 0))
    for slow, fast in zip(taught.parameters(), model.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.2
    with torch.no_grad():
        user.loss(square(user, teach, 1))


@trial("`backward(retain_graph=True)`, twice, and two losses of one forward", ways=UNCOMPILED)
def twice(user: User) -> None:
    model = user.partition(MLP())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        hidden = model.features(user.numbers(step, 4, 6))
        first, second = model.head(hidden).square().mean(), hidden.abs().mean()
        first.backward(retain_graph=True)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(first + second)
    user.parameters(model)


@trial("the same with the model compiled", ways=COMPILED)
def twice_compiled(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        out = run(user.numbers(step, 4, 6))
        first, second = out.square().mean(), out.abs().mean()
        first.backward(retain_graph=True)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(first + second)
    user.parameters(model)


@trial("`autograd.grad` of inputs, of parameters, of both; gradients put into `.grad` by hand")
def grads(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = user.numbers(0, 4, 6).requires_grad_(True)
    (saliency,) = torch.autograd.grad(run(x).sum(), x)
    user.loss(saliency.abs().sum() * (1 if user.is_alone else 2))
    for step in range(2):
        found = torch.autograd.grad(square(user, run, step), list(model.parameters()))
        for param, grad in zip(model.parameters(), found, strict=True):
            param.grad = grad
        optimizer.step()
    user.parameters(model)


@trial("freezing and unfreezing layers during training, `requires_grad` flipped between batches")
def freezing(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.Adam(model.parameters(), 0.01)
    for step, frozen in enumerate(("", "inward", "inward", "head", "", "between")):
        for name, param in model.named_parameters():
            param.requires_grad = not (frozen and name.startswith(frozen))
        train(user, run, optimizer, steps=1, first=step)
    user.parameters(model)


@trial("`train()` and `eval()` in turn, with dropout and seeds, the same batch on each rank")
def modes(user: User) -> None:
    model = user.partition(MLP(dropout=0.4))
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(step)
        loss = run(everybody(step, 4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            user.loss(run(everybody(50, 4, 6)).square().mean(), "evaluated")
        model.train()
        user.loss(loss)
    user.parameters(model)


@trial("batches of other sizes, a smaller last one, an empty one")
def sizes(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step, rows in enumerate((8, 8, 4, 2, 0, 8)):
        loss = run(user.numbers(step, rows, 6)).square().sum() * (1 if user.is_alone else 2) / 8
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.note(torch.stack([p.detach().norm() if user.is_alone else p.full_tensor().norm() for p in model.parameters()]))


@trial("a rank whose batch is empty while the other's is not")
def empty_on_one_rank(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    world = 1 if user.is_alone else 2
    for step in range(3):
        x = everybody(step, 4, 6)
        if step == 1 and not user.is_alone:
            x = x if dist.get_rank() == 0 else x[:0]
        elif not user.is_alone:
            x = user.rows(x)
        loss = run(x).square().sum() * world / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    for name, param in model.named_parameters():
        user.note(param, name)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None


class Pair(NamedTuple):
    loss: Tensor
    parts: dict[str, Tensor]


class Talkative(MLP):
    """Keyword arguments alone, some of them None; results of several kinds."""

    def forward(self, *, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None, kind: str = "dict") -> Any:
        out = super().forward(x)
        out = out if mask is None else out * mask
        loss = out.square().mean() if y is None else F.mse_loss(out, y)
        kinds = {"dict": {"loss": loss, "none": None}, "class": Output(loss, out), "tuple": Pair(loss, {"l": loss})}
        return kinds[kind]


@trial("keyword arguments alone, None among them; results as dicts, dataclasses, named tuples")
def talkative(user: User) -> None:
    model = user.partition(Talkative())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step, kind in enumerate(("dict", "class", "tuple", "dict")):
        x, y = user.numbers(step, 4, 6), user.numbers(50 + step, 4, 4)
        given = {"x": x, "y": None if step % 2 else y, "mask": torch.ones(4) if step == 2 else None}
        found = run(**given, kind=kind)
        loss = found["loss"] if kind == "dict" else found.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial("a `DataLoader` with workers, a `DistributedSampler`, and gradients that add up over two batches")
def loader(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(everybody(0, 16, 6), everybody(1, 16, 4))
    sampler = None if user.is_alone else DistributedSampler(data, shuffle=False)
    batches = DataLoader(data, batch_size=8 if user.is_alone else 4, sampler=sampler, num_workers=1)
    for _ in range(2):
        for x, y in batches:
            loss = F.mse_loss(run(x), y) / 2
            loss.backward()
            user.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    user.parameters(model)


@trial("a compiled training step, with `backward()` and `optimizer.step()` inside")
def whole_step(user: User) -> None:
    model = user.partition(MLP())
    optimizer = optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = user.compile(step)
    for number in range(3):
        user.loss(run(user.numbers(number, 4, 6), user.numbers(50 + number, 4, 4)))
    user.parameters(model)


@trial("compiled parts inside a compiled model, and a part that is called by itself")
def nested(user: User) -> None:
    model = user.partition(MLP())
    model.between.compile(backend="dsgraph", options={"codegen": "eager"}) if not user.is_alone else None
    run, part = user.compile(model), user.compile(model.head)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = square(user, run, step) + part(user.numbers(step, 4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


class Checkpointed(MLP):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inward(x))
        x = checkpoint(self.between, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@trial("`checkpoint(use_reentrant=True)`", ways=UNCOMPILED)
def reentrant(user: User) -> None:
    model = user.partition(Checkpointed(use_reentrant=True))
    train(user, model, optim.SGD(model.parameters(), lr=0.1))
    user.parameters(model)


@trial("the same with the model compiled", ways=COMPILED)
def reentrant_compiled(user: User) -> None:
    model = user.partition(Checkpointed(use_reentrant=True))
    train(user, user.compile(model), optim.SGD(model.parameters(), lr=0.1))
    user.parameters(model)


@trial("checkpoints and `accumulate` at once")
def checkpointed_micro_batches(user: User) -> None:
    model = user.partition(Checkpointed(use_reentrant=False))
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for micro in range(2):
            with nullcontext() if user.is_alone or micro else dsgraph.accumulate(model):
                loss = square(user, run, 10 * step + micro) / 2
                loss.backward()
            user.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    user.parameters(model)


@trial("`autocast` to bfloat16 on the CPU, around forward and loss", rtol=2e-2, atol=2e-3)
def autocast(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(user, run, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial("a thread that evaluates between two steps")
def threads(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []

    def evaluate() -> None:
        with torch.no_grad():
            found.append(square(user, run, 77))

    for step in range(2):
        train(user, run, optimizer, steps=1, first=step)
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        user.loss(found.pop())
    user.parameters(model)


@trial("`set_default_dtype(torch.float64)` before the model is built")
def default_dtype(user: User) -> None:
    torch.set_default_dtype(torch.float64)
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = run(user.numbers(step, 4, 6).double()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial("backpropagation through time in pieces: a hidden state that is detached from batch to batch")
def pieces(user: User) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            state = self.cell(x, state)
            return self.head(state), state

    model = user.partition(Recurrent())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    state = None
    for step in range(4):
        out, state = run(user.numbers(step, 4, 6), state)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state = state.detach()
        user.loss(loss)
    user.parameters(model)
