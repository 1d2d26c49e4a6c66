"""Values of parameters and gradients that users print, log and measure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.trials.models import MLP, square
from tests.trials.trial import UNCOMPILED, trial
from tests.trials.user import User


@trial(
    "statistics of parameters and gradients for a log: `.norm().item()`, `.mean()`, `.sum()`, `float(p.abs().max())`",
    was="those of the rank's own rows, silently",
)
def figures(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    square(user, run, 0).backward()
    for param in model.parameters():
        for tensor in (param, param.grad, param.data):
            user.note(tensor.norm().item(), "norm")
            user.note(tensor.mean().item(), "mean")
            user.note(float(tensor.abs().max()), "largest")
            user.note(tensor.min().item(), "least")
            user.note(tensor.sum().item(), "sum")
            user.note((tensor > 0).sum().item(), "positive")
            user.note((tensor**2).sum().sqrt().item(), "norm by hand")


def _spoil_last_row(user: User, grad: Any) -> None:
    """Spoil the last rank's rows of a gradient that is sharded by rows."""
    if user.is_alone:
        grad[-1] = float("nan")
    elif dist.get_rank() == 1 or not any(placement.is_shard() for placement in grad.placements):
        grad.to_local()[-1] = float("nan")


@trial(
    "checks for NaN that decide: `if torch.isnan(p.grad).any():`, `if not p.isfinite().all():`",
    was="each rank checked only its own rows, silently",
)
def checks(user: User) -> None:
    model = user.partition(MLP())
    run = user.compile(model)
    square(user, run, 0).backward()
    for last in (False, True):
        for param in model.parameters():
            if last:
                _spoil_last_row(user, param.grad)
            user.note(bool(torch.isnan(param.grad).any()), "any")
            user.note(not param.grad.isfinite().all(), "all")
            user.note(torch.isnan(param.grad.sum()).item(), "sum")


@trial("standard deviations and variances: `p.std().item()`, `p.var(dim=0)`", ways=UNCOMPILED)
def deviations(user: User) -> None:
    model = user.partition(MLP())
    for param in model.parameters():
        user.note(param.var().item(), "var")
        user.note(param.std().item(), "std")
        if param.dim() == 2:
            user.note(param.mean(dim=0), "means")
            user.note(param.norm(dim=1), "norms of rows")
            user.note(param.norm(dim=0), "norms of columns")


@trial("medians, quantiles, largest elements, rows and masks of what `parameters()` gives", ways=UNCOMPILED)
def orders(user: User) -> None:
    model = user.partition(MLP())
    weight = dict(model.named_parameters())["between.weight"].detach()
    user.note(weight.argmax().item(), "argmax")
    user.note(weight.max(dim=0).values, "max")
    user.note(weight.flatten().topk(3).values, "topk")
    user.note(weight.flatten().sort().values, "sort")
    user.note(weight.median(), "median")
    user.note(weight[5], "row")
    user.note(weight[2:7], "rows")
    user.note(weight[:, 3], "column")
    user.note(weight.t() @ weight, "product")
    user.note(torch.linalg.norm(weight), "Frobenius")
    user.note(weight.cumsum(0), "cumsum")
    user.note(weight.flip(0), "flip")


@trial("`torch.linalg.svdvals`, `matrix_norm(ord=2)`, `matrix_rank` of attributes", ways=UNCOMPILED)
def spectra(user: User) -> None:
    model = user.partition(MLP())
    user.note(torch.linalg.svdvals(model.between.weight.detach()))
    user.note(torch.linalg.matrix_norm(model.between.weight, ord=2))
    user.note(torch.linalg.matrix_rank(model.head.weight.data))


@trial("`p.tolist()`", ways=UNCOMPILED, refused=r".tolist\(\) is not supported for tensor subclasses, got DTensor")
def to_list(user: User) -> None:
    model = user.partition(MLP())
    user.note(torch.tensor(dict(model.named_parameters())["head.bias"].tolist()))


@trial("`p.detach().cpu().numpy()`", ways=UNCOMPILED, refused=r".numpy\(\) is not supported for tensor subclasses")
def to_numpy(user: User) -> None:
    model = user.partition(MLP())
    for param in model.parameters():
        user.note(torch.from_numpy(param.detach().cpu().numpy()))


@trial(
    "`p.cpu()`, `p.clone()`, `p.float()`, `p.to(torch.float64)`; `.numpy()` and `.tolist()` of attributes",
    ways=UNCOMPILED,
)
def to_cpu(user: User) -> None:
    model = user.partition(MLP())
    for param in model.parameters():
        user.note(param.detach().cpu().clone().float(), "cpu")
        user.note(param.to(torch.float64), "double")
    user.note(torch.from_numpy(model.between.weight.detach().cpu().numpy()), "numpy")
    user.note(torch.tensor(model.head.weight.tolist()), "list")


@trial(
    "counts and shapes: `sum(p.numel())`, `p.shape`, `p.stride()`, sizes of memory, `named_parameters`", ways=UNCOMPILED
)
def counts(user: User) -> None:
    model = user.partition(MLP())
    user.note(sum(p.numel() for p in model.parameters() if p.requires_grad))
    user.note(sum(p.numel() * p.element_size() for p in model.parameters()))
    for param in model.parameters():
        user.note(list(param.shape))
        user.note(list(param.stride()))
    user.note(model.head.weight.shape[0] + model.head.weight.numel() + model.head.weight.size(1))
    user.note(model.head.in_features)
    user.note(len(model.state_dict()))


@trial(
    "`model.get_parameter(name)`, `get_submodule`, `named_parameters(remove_duplicate=False)`",
    ways=UNCOMPILED,
    was="torch's error: `is not an nn.Parameter`",
)
def get_parameter(user: User) -> None:
    model = user.partition(MLP())
    user.note(model.get_parameter("between.weight"))
    user.note(model.get_submodule("head").get_parameter("bias"))
    model.get_parameter("head.bias").requires_grad_(False)
    user.note([p.requires_grad for _, p in model.named_parameters(remove_duplicate=False)])
    user.note("head.weight" in dict(model.named_parameters()))


@trial("a histogram of every gradient, `torch.histc`, `torch.histogram`", ways=UNCOMPILED)
def histograms(user: User) -> None:
    model = user.partition(MLP())
    square(user, model, 0).backward()
    for param in model.parameters():
        user.note(torch.histc(param.grad.float(), bins=4, min=-1, max=1))


@trial("equality: `torch.equal(p, q)`, `torch.isclose(p, q).all()`, `(p == q).all()` between copies", ways=UNCOMPILED)
def equality(user: User) -> None:
    first, second = user.partition(MLP()), user.partition(MLP())
    second.load_state_dict(first.state_dict())
    for change in (False, True):
        if change:
            with torch.no_grad():
                nn.init.constant_(second.between.weight[-1:], 0.5)  # the last rank's rows alone
        pairs = list(zip(first.parameters(), second.parameters(), strict=True))
        user.note([bool((p == q).all()) for p, q in pairs], "by hand")
        user.note([torch.equal(p, q) for p, q in pairs], "equal")
        user.note([bool(torch.isclose(p, q).all()) for p, q in pairs], "isclose")


@trial("`torch.allclose(p, q)`", ways=UNCOMPILED, refused=r"Sharding propagation failed for aten.allclose")
def all_close(user: User) -> None:
    model = user.partition(MLP())
    user.note([torch.allclose(p, p) for p in model.parameters()])
