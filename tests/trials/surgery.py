"""Hooks, layers and parameters that are changed after the model was partitioned."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize, prune

from tests.trials.models import MLP, square, train
from tests.trials.trial import COMPILED, UNCOMPILED, trial
from tests.trials.user import User, full


def _trained(user: User, model: nn.Module, steps: int = 3) -> None:
    train(user, user.compile(model), optim.SGD(model.parameters(), lr=0.1), steps)
    user.parameters(model)


@trial("`spectral_norm` of `parametrizations` before `partition`")
def spectral(user: User) -> None:
    model = MLP()
    parametrizations.spectral_norm(model.between)
    _trained(user, user.partition(model))


@trial("`orthogonal` of `parametrizations` before `partition`")
def orthogonal(user: User) -> None:
    model = MLP()
    parametrizations.orthogonal(model.between)
    _trained(user, user.partition(model))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@trial("a custom parametrization before `partition`, inside `parametrize.cached()` as well")
def own_parametrization(user: User) -> None:
    model = MLP()
    parametrize.register_parametrization(model.between, "weight", Symmetric())
    model = user.partition(model)
    _trained(user, model)
    with parametrize.cached():
        user.loss(square(user, model, 9) + square(user, model, 9))


_BEFORE = r"cannot be given other memory.*parametrizations are registered and removed before dsgraph.partition"


@trial("`register_parametrization` on a partitioned model", refused=_BEFORE, was="refused without saying what to do")
def late_parametrization(user: User) -> None:
    model = user.partition(MLP())
    parametrize.register_parametrization(model.between, "weight", Symmetric())
    model = user.again(model)
    _trained(user, model)


@trial("`remove_parametrizations` from a partitioned model", refused=_BEFORE, was="refused without saying what to do")
def removed_parametrization(user: User) -> None:
    model = MLP()
    parametrize.register_parametrization(model.between, "weight", Symmetric())
    model = user.partition(model)
    train(user, user.compile(model), optim.SGD(model.parameters(), lr=0.1))
    parametrize.remove_parametrizations(model.between, "weight")
    model = user.again(model)
    _trained(user, model)


@trial("`prune.l1_unstructured` before `partition`")
def pruned(user: User) -> None:
    model = MLP()
    prune.l1_unstructured(model.between, "weight", amount=0.3)
    _trained(user, user.partition(model))


@trial(
    "`prune.l1_unstructured` on a partitioned model",
    refused=r"cannot be registered in a module.*torch.nn.utils.prune .* before dsgraph.partition",
    was="torch's error: `cannot assign 'torch.FloatTensor' object to parameter 'weight_orig'`",
)
def late_pruning(user: User) -> None:
    model = user.partition(MLP())
    prune.l1_unstructured(model.between, "weight", amount=0.3)
    model = user.again(model)
    _trained(user, model)
    prune.remove(model.between, "weight")
    _trained(user, user.again(model))


@trial("the old `spectral_norm` and `weight_norm` before `partition`")
def old_norms(user: User) -> None:
    model = MLP()
    torch.nn.utils.spectral_norm(model.between)
    torch.nn.utils.weight_norm(model.head)
    _trained(user, user.partition(model))


@trial("forward hooks that keep features and change results, forward pre-hooks")
def forward_hooks(user: User) -> None:
    model = user.partition(MLP())
    kept: list[Tensor] = []
    model.between.register_forward_hook(lambda module, args, out: kept.append(out.detach().mean()))
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model.head.register_forward_hook(lambda module, args, out: out + 0.1)
    _trained(user, model)
    for value in kept:
        user.loss(value, "kept")


@trial("`register_full_backward_hook` that scales gradients and keeps norms")
def backward_hooks(user: User) -> None:
    model = user.partition(MLP())
    model.between.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    _trained(user, model)


@trial("hooks of parameters that scale or mask gradients: `p.register_hook`")
def parameter_hooks(user: User) -> None:
    model = user.partition(MLP())
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    mask = torch.ones(8, 8).tril()
    model.between.weight.register_hook(lambda grad: grad * mask)
    _trained(user, model)


@trial("a hook that clamps a weight in each forward", ways=UNCOMPILED, was="without effect, silently")
def writing_hook(user: User) -> None:
    model = user.partition(MLP())

    def clamp(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.2, 0.2)

    model.between.register_forward_pre_hook(clamp)
    _trained(user, model)


@trial("a forward that clamps its own weight, uncompiled", ways=UNCOMPILED, was="without effect, silently")
def writing_forward(user: User) -> None:
    class Clamped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.between.weight.data.clamp_(-0.2, 0.2)
            return super().forward(x)

    _trained(user, user.partition(Clamped()))


@trial("a layer replaced by `nn.Identity()`, one removed, one put between")
def replaced(user: User) -> None:
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    model = user.partition(layers)
    model[3] = nn.Identity()
    _trained(user, model)
    del model[2]
    _trained(user, model)
    model.insert(1, nn.LayerNorm(8))
    _trained(user, user.again(model))


@trial(
    "`model.to(torch.bfloat16)` of a partitioned model",
    rtol=2e-2,
    atol=1e-2,
    refused=r"Couldn't swap Linear.weight",
    refused_in=COMPILED,
)
def to_bfloat16(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    user.loss(square(user, run, 0))
    model.to(torch.bfloat16)
    with torch.no_grad():
        user.loss(run(user.numbers(1, 4, 6).bfloat16()).float().square().mean())
    user.note([p.dtype == torch.bfloat16 for p in model.parameters()])
    for param in model.parameters():
        user.note(full(param.detach()).float())


@trial(
    "`model.double()` of a partitioned model during training",
    refused=r"Couldn't swap Linear.weight",
    refused_in=COMPILED,
)
def to_double(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    train(user, run, optim.SGD(model.parameters(), lr=0.1))
    model.double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = run(user.numbers(step, 4, 6).double()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial(
    "`model.half().float()`, `model.to('cpu')`, `model.type(torch.float32)` of a partitioned model",
    refused=r"Couldn't swap Linear.weight",
    refused_in=COMPILED,
)
def moved(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    user.loss(square(user, run, 0))
    model.half().float()
    user.loss(square(user, run, 1))
    model.to("cpu").type(torch.float32)
    _trained(user, model)


@trial("`model.to(memory_format=torch.channels_last)` of a partitioned convolution net")
def channels_last(user: User) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    model = user.partition(model)
    model = model.to(memory_format=torch.channels_last)
    run = user.compile(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = user.numbers(step, 4, 3, 6, 6).to(memory_format=torch.channels_last)
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    for name, param in model.named_parameters():
        user.note(full(param.detach()).contiguous(), name)


@trial("`model.requires_grad_(False)`, `model.apply`, `model.children` on a partitioned model")
def odds(user: User) -> None:
    model = user.partition(MLP())
    model.requires_grad_(False)
    for child in model.children():
        child.requires_grad_(True)
    model.apply(lambda module: torch.nn.init.normal_(module.weight, std=0.3) if hasattr(module, "weight") else None)
    _trained(user, model)


@trial(
    "`model.share_memory()` of a partitioned model",
    ways=UNCOMPILED,
    refused=r"whose shards cannot be moved to shared memory",
    was="the process crashed inside torch",
)
def shared_memory(user: User) -> None:
    user.partition(MLP()).share_memory()


@trial("`torch.nn.utils.fuse_linear_bn_eval` of partitioned layers", ways=UNCOMPILED)
def fused(user: User) -> None:
    model = user.partition(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    model.eval()
    with torch.no_grad():
        merged = torch.nn.utils.fuse_linear_bn_eval(model[0], model[1])
    user.loss(merged(user.numbers(0, 4, 6)).square().mean())
    user.loss(model(user.numbers(0, 4, 6)).square().mean())


@trial("`torch.fx.symbolic_trace` of a partitioned model", ways=UNCOMPILED)
def traced(user: User) -> None:
    model = user.partition(MLP())
    graph = torch.fx.symbolic_trace(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = square(user, graph, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)


@trial(
    "`torch.jit.trace` of a partitioned model",
    ways=UNCOMPILED,
    refused=r"torch.jit.trace of Linear, which is part of a partitioned model",
    was="torch's error: `unsupported input list type: str`",
)
def jit_traced(user: User) -> None:
    model = user.partition(MLP())
    program = torch.jit.trace(model, user.numbers(0, 4, 6))
    train(user, model, optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        user.loss(F.mse_loss(program(user.numbers(0, 4, 6)), user.numbers(1, 4, 4)))


@trial("`torch.export.export` of a partitioned model", ways=UNCOMPILED)
def exported(user: User) -> None:
    model = user.partition(MLP())
    program = torch.export.export(model, (user.numbers(0, 4, 6),))
    with torch.no_grad():
        user.loss(program.module()(user.numbers(0, 4, 6)).square().mean())
