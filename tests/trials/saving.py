"""Checkpoints, copies, files."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tests.trials.models import MLP, square, train
from tests.trials.trial import UNCOMPILED, trial
from tests.trials.user import User, full


def _folder(user: User) -> Path:
    """A new folder, the same on all ranks: alone as well, where both ranks run the same script."""
    name = [tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    return Path(name[0])


@trial("model and optimizer saved by `torch.distributed.checkpoint` during training, loaded into new ones")
def distributed_checkpoint(user: User) -> None:
    folder = _folder(user)
    model = user.partition(MLP())
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    train(user, user.compile(model), optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    torch.manual_seed(9)
    second = user.partition(MLP())
    again = optim.Adam(second.parameters(), lr=0.01)
    found = get_state_dict(second, again)
    loaded: dict[str, Any] = {"model": found[0], "optimizer": found[1]}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(second, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(user, user.compile(second), again, first=3)
    user.parameters(second)


@trial("a full state dict gathered on the first rank, saved by `torch.save`, loaded from the first rank alone")
def full_state(user: User) -> None:
    folder = _folder(user)
    model = user.partition(MLP())
    train(user, user.compile(model), optim.SGD(model.parameters(), lr=0.1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, folder / "model.pt")
    dist.barrier()
    second = user.partition(MLP())
    first = user.is_alone or dist.get_rank() == 0
    saved = torch.load(folder / "model.pt") if first else {}
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not user.is_alone)
    set_model_state_dict(second, saved, options=broadcast)
    user.loss(square(user, second, 5))
    user.parameters(second)


@trial("`torch.save(model.state_dict())` on each rank into files of its own, and `load_state_dict` of them")
def own_files(user: User) -> None:
    folder = _folder(user)
    model = user.partition(MLP())
    train(user, user.compile(model), optim.SGD(model.parameters(), lr=0.1))
    file = folder / f"{dist.get_rank()}.pt"
    torch.save(model.state_dict(), file)
    second = user.partition(MLP())
    user.note(str(second.load_state_dict(torch.load(file, weights_only=False))) == "<All keys matched successfully>")
    user.loss(square(user, user.compile(second), 5))
    user.parameters(second)


@trial("a checkpoint of one process loaded after `partition`: strict, with missing and unexpected keys, other shapes")
def plain_checkpoint(user: User) -> None:
    torch.manual_seed(3)
    state = MLP().state_dict()
    model = user.partition(MLP())
    model.load_state_dict(state)
    user.loss(square(user, user.compile(model), 5))
    del state["head.bias"]
    state["more"] = torch.ones(2)
    found = model.load_state_dict(state, strict=False)
    user.note([found.missing_keys == ["head.bias"], found.unexpected_keys == ["more"]])
    said = ""
    try:
        model.load_state_dict({**state, "head.weight": torch.ones(3, 8)}, strict=False)
    except RuntimeError as error:
        said = str(error)
    user.note("size mismatch for head.weight" in said)
    user.parameters(model)


@trial("safetensors: `save_file` of gathered tensors, `save_model(model)`, `load_file`", ways=UNCOMPILED)
def safetensors(user: User) -> None:
    folder = _folder(user)
    model = user.partition(MLP())
    state = {name: full(value).detach().contiguous() for name, value in model.state_dict().items()}
    rank = dist.get_rank()
    save_file(state, folder / f"{rank}.safetensors")
    second = user.partition(MLP())
    second.load_state_dict(load_file(folder / f"{rank}.safetensors"))
    user.parameters(second)


@trial(
    "`safetensors.torch.save_model(model)` of shards",
    ways=UNCOMPILED,
    refused=r"data pointer on an invalid python storage",
)
def safetensors_model(user: User) -> None:
    folder = _folder(user)
    model = user.partition(MLP())
    rank = dist.get_rank()
    save_model(model, str(folder / f"{rank}.safetensors"))
    user.state({name: load_file(folder / f"{rank}.safetensors")[name] for name in model.state_dict()})


@trial("hooks of state dicts that rename keys, prefixes, `keep_vars=True`")
def state_hooks(user: User) -> None:
    model = user.partition(MLP())
    renamed = lambda module, state, prefix, local: state.update({f"{prefix}x": state.pop(f"{prefix}head.bias")})  # noqa: E731
    handle = model.register_state_dict_post_hook(renamed)
    user.note("x" in model.state_dict() and "head.bias" not in model.state_dict())
    handle.remove()
    user.note(model.state_dict(keep_vars=True, prefix="p.")["p.head.bias"].requires_grad)
    user.state(model.state_dict(prefix="p."))


@trial("`copy.deepcopy` of model and optimizer together, both trained on")
def copies(user: User) -> None:
    model = user.partition(MLP())
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    train(user, user.compile(model), optimizer)
    twin, twins = copy.deepcopy((model, optimizer))
    train(user, user.compile(twin), twins, first=3)
    user.parameters(model)
    user.parameters(twin)
    train(user, user.compile(model), optimizer, first=3)
    user.parameters(model)


@trial("a pickled optimizer", ways=UNCOMPILED)
def pickled_optimizer(user: User) -> None:
    model = user.partition(MLP())
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    train(user, model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    user.note([len(found.state), len(optimizer.state)])
    for group, own in zip(found.param_groups, optimizer.param_groups, strict=True):
        for mine, theirs in zip(group["params"], own["params"], strict=True):
            user.note(full(mine.detach()) - full(theirs.detach()))


@trial("the weights of a partitioned model put into a plain one: `plain.load_state_dict(...)`", ways=UNCOMPILED)
def into_plain(user: User) -> None:
    torch.manual_seed(4)
    model, plain = user.partition(MLP()), MLP()
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    user.parameters(plain)


@trial(
    "a layer's weight copied from a partitioned model: `plain.weight.data.copy_(model.head.weight)`", ways=UNCOMPILED
)
def copied_weight(user: User) -> None:
    model, plain = user.partition(MLP()), nn.Linear(8, 4)
    plain.weight.data.copy_(model.head.weight)
    plain.bias = nn.Parameter(model.head.bias.detach().clone())
    user.note(plain.weight)
    plain.load_state_dict(model.head.state_dict()) if user.is_alone else plain.load_state_dict(
        {name: value.full_tensor() for name, value in model.head.state_dict().items()}
    )
    user.parameters(plain)
