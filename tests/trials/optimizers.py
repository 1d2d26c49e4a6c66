"""Optimizers, schedules, clipping, averages of weights."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils

from tests.trials.models import MLP, square, train
from tests.trials.trial import UNCOMPILED, trial
from tests.trials.user import User, full


@trial("LBFGS with a closure and a line search")
def lbfgs(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = square(user, run, step)
            loss.backward()
            return _mean(user, loss)

        user.note(optimizer.step(closure), "loss")
    user.parameters(model)


def _mean(user: User, loss: Tensor) -> Tensor:
    if user.is_alone:
        return loss
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


@trial("groups of parameters by name and dimension, then `add_param_group` of an unfrozen layer")
def groups(user: User) -> None:
    model = user.partition(MLP())
    model.inward.requires_grad_(False)
    run = user.compile(model)
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0, "lr": 0.02},
        ],
        lr=0.01,
    )
    train(user, run, optimizer)
    model.inward.requires_grad_(True)
    optimizer.add_param_group({"params": model.inward.parameters(), "lr": 0.005})
    train(user, run, optimizer, first=3)
    user.parameters(model)


@trial("`optimizer.state_dict()` into a new optimizer during training, through `torch.save` as well")
def optimizer_state(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    train(user, run, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = optim.Adam(model.parameters(), lr=0.5)
    second.load_state_dict(torch.load(file, weights_only=False))
    train(user, run, second, first=3)
    third = optim.Adam(model.parameters(), lr=0.5)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    train(user, run, third, first=6)
    user.parameters(model)


@trial("`torch.compile(optimizer.step)`")
def compiled_step(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(3):
        loss = square(user, run, number)
        loss.backward()
        step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial("every learning rate schedule of torch")
def schedules(user: User) -> None:
    makes: dict[str, Any] = {
        "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
        "step": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=4),
        "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=2),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        "sequential": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 2)], [2]
        ),
        "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    }
    for name, make in makes.items():
        model = user.partition(MLP())
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = make(optimizer)
        for step in range(3):
            loss = square(user, model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(*[1.0] * (name == "plateau"))
            user.note(optimizer.param_groups[0]["lr"], name)
        user.parameters(model)


@trial("a learning rate that is a tensor")
def tensor_rate(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    train(user, run, optimizer)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    train(user, run, optimizer, first=3)
    user.parameters(model)


@trial("stochastic weight averaging: `AveragedModel`, `SWALR`, `update_bn`")
def swa(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    averaged = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for step in range(3):
        train(user, run, optimizer, steps=1, first=step)
        averaged.update_parameters(model)
        schedule.step()
    swa_utils.update_bn([user.numbers(9, 4, 6)], averaged)
    user.loss(square(user, averaged, 7))
    user.parameters(averaged)


@trial("moving averages by `get_ema_multi_avg_fn` over a compiled model")
def ema(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(3):
        train(user, run, optimizer, steps=1, first=step)
        averaged.update_parameters(model)
    user.loss(square(user, averaged, 7))
    user.parameters(averaged)


@trial("`zero_grad(set_to_none=False)`, and `model.zero_grad()`")
def zeros(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False) if step < 2 else model.zero_grad(set_to_none=False)
        square(user, run, step).backward()
        optimizer.step()
    user.parameters(model)


@trial("`GradScaler` on the CPU, with an overflow on one rank")
def scaler(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        x = user.rows(_last_row_overflows(step))
        loss = run(x).square().mean()
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        user.note(grad_scaler.get_scale(), "scale")
    user.note(torch.stack([full(p.detach()).sum() for p in model.parameters()]))


def _last_row_overflows(step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    if step == 2:
        x[3, 0] = math.nan
    return x


@trial("`clip_grad_norm_` of every norm, whose value is printed; `clip_grad_value_`")
def clipping(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for norm_type in (2.0, 1.0, math.inf):
        square(user, run, 0).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type, error_if_nonfinite=True)
        user.note(float(norm), "as a number")
        optimizer.step()
        optimizer.zero_grad()
    square(user, run, 1).backward()
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    user.note(total.item(), "total norm")
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total)
    nn.utils.clip_grad_value_(model.parameters(), 0.004)
    optimizer.step()
    user.parameters(model)


@trial("an optimizer step inside the backward, by `register_post_accumulate_grad_hook`")
def step_in_backward(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizers = {param: optim.Adam([param], lr=0.01) for param in model.parameters()}

    def hook(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        loss = square(user, run, step)
        loss.backward()
        user.loss(loss)
    user.parameters(model)


@trial("a custom optimizer: signs of gradients, trust ratios of layers")
def own_optimizer(user: User) -> None:
    class Own(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                ratio = param.norm() / (param.grad.norm() + 1e-6)
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.9).add_(param.grad.sign())
                param.add_(momentum * ratio, alpha=-0.01)

    model = user.partition(MLP())
    run = user.compile(model)
    train(user, run, Own(model.parameters()))
    user.parameters(model)


@trial("sharpness-aware minimization: climb by `.data`, backward again, go back")
def sam(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        square(user, run, step).backward()
        norm = torch.norm(torch.stack([full(p.grad.norm()) for p in model.parameters()]))
        steps = [p.grad * (0.05 / float(norm)) for p in model.parameters()]
        for param, up in zip(model.parameters(), steps, strict=True):
            param.data.add_(up)
        optimizer.zero_grad()
        loss = square(user, run, step)
        loss.backward()
        for param, up in zip(model.parameters(), steps, strict=True):
            param.data.sub_(up)
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial("two optimizers on one model, and a step for each other batch")
def two_optimizers(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    body = optim.Adam([*model.inward.parameters(), *model.between.parameters()], lr=0.01)
    head = optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(4):
        loss = square(user, run, step)
        loss.backward()
        (body if step % 2 else head).step()
        model.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial("two models and one optimizer")
def two_models(user: User) -> None:
    first, second = user.partition(MLP()), user.partition(MLP(4, 8, 4))
    runs = user.compile(first), user.compile(second)
    optimizer = optim.AdamW([*first.parameters(), *second.parameters()], lr=0.01)
    train(user, lambda x: runs[1](runs[0](x)), optimizer)
    user.parameters(first)
    user.parameters(second)


_DRIFT = r"which is replicated, was written to since the last step, and ranks have different values now"


@trial(
    "`nn.init` and `p.data.uniform_()` of `model.parameters()`, with different seeds on different ranks",
    ways=UNCOMPILED,
    refused=_DRIFT,
    was="replicated parameters differed between ranks, silently",
)
def own_init(user: User) -> None:
    model = user.partition(MLP())
    torch.manual_seed(torch.distributed.get_rank())
    for param in model.parameters():
        nn.init.xavier_uniform_(param) if param.dim() > 1 else param.data.uniform_(-0.1, 0.1)
    train(user, model, optim.SGD(model.parameters(), lr=0.1), steps=1)


@trial(
    "noise added between steps, `p.add_(torch.randn_like(p))`, with different seeds on different ranks",
    ways=UNCOMPILED,
    refused=_DRIFT,
    was="replicated parameters differed between ranks, silently",
)
def noise(user: User) -> None:
    model = user.partition(MLP())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(2):
        train(user, model, optimizer, steps=1, first=step)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.01)


@trial("the same by the attributes: `nn.init` and noise of `model.layer.weight`", ways=UNCOMPILED)
def attribute_noise(user: User) -> None:
    model = user.partition(MLP())
    torch.manual_seed(0 if user.is_alone else torch.distributed.get_rank())
    with torch.no_grad():
        for layer in (model.inward, model.between, model.head):
            nn.init.xavier_uniform_(layer.weight)
            layer.bias.add_(torch.randn_like(layer.bias) * 0.01)
    train(user, model, optim.SGD(model.parameters(), lr=0.1))
    user.parameters(model)


@trial("manual updates without an optimizer: `p.data -= lr * p.grad.data`, `p -= lr * p.grad`")
def by_hand(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    for step in range(4):
        loss = square(user, run, step)
        loss.backward()
        for param in model.parameters():
            if step % 2:
                param.data -= 0.1 * param.grad.data
            else:
                with torch.no_grad():
                    param -= 0.1 * param.grad
            param.grad = None
        user.loss(loss)
    user.parameters(model)


@trial(
    "`nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(...) / 2, ...)`",
    ways=UNCOMPILED,
    refused=r"its .data was replaced, which does not reach the shards",
    was="without effect, silently",
)
def vectors(user: User) -> None:
    model = user.partition(MLP())
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    user.loss(square(user, model, 0))
    user.parameters(model)


@trial("an average of weights by a loop over two state dicts, copied back")
def swap_state(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        train(user, run, optimizer, steps=1, first=step)
        for name, value in model.state_dict().items():
            average[name] = 0.5 * average[name] + 0.5 * value
    backup = copy.deepcopy(model.state_dict())
    model.load_state_dict(average)
    user.loss(F.mse_loss(run(user.numbers(9, 4, 6)), user.numbers(8, 4, 4)))
    model.load_state_dict(backup)
    train(user, run, optimizer, first=3)
    user.parameters(model)
