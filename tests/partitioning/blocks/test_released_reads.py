"""Ways and moments to read a parameter of a block whose full value was released: none ends the process.

Each pair runs in a process of its own, forked from one that has trained. It may raise an error of Python.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dsgraph

pytestmark = [pytest.mark.full, pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")]

_WIDTH = 16
_TOKENS = torch.arange(16).view(2, 8)
_HELD: list[Any] = []
"""The tensors that a way of reading has taken."""


class _Block(nn.Module):
    """A block that gives its weight away in many ways.

    Attributes:
        way: How.
        left: What it left.
    """

    way = ""
    left: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        if self.way == "attribute":
            self.left = self.up.weight
        if self.way == "view":
            self.left = self.up.weight.T[1:]
        if self.way == "detached":
            self.left = self.up.weight.detach()
        if self.way == "data":
            self.left = self.up.weight.data
        if self.way == "container":
            self.left = {"weights": [self.up.weight, self.up.bias.expand(3, 32)]}
        if self.way == "closure":
            weight = self.up.weight
            self.left = lambda: weight
        if self.way == "list":
            _HELD.append(self.up.weight)
        if self.way == "call":
            _hold(self.up.weight)
        if self.way == "after a break":
            torch._dynamo.graph_break()
            self.left = self.up.weight
        if self.way == "uncompiled":
            self._hold_uncompiled()
        if self.way == "result":
            return x + self.down(h), self.up.weight  # type: ignore[return-value]
        if self.way == "raises":
            raise ValueError("in the forward")
        return x + self.down(h)

    @torch.compiler.disable
    def _hold_uncompiled(self) -> None:
        _HELD.append(self.up.weight)


@torch.compiler.disable
def _hold(tensor: Tensor) -> None:
    _HELD.append(tensor)


class _Model(nn.Module):
    """A model whose forward and backward call `at` with the name of a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, _WIDTH), nn.Linear(_WIDTH, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.at: Callable[[str], None] = lambda _: None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, weight = x
                _hold(weight)
            self._say("between blocks")
        if x.requires_grad:
            x.register_hook(lambda _: self._say("in the backward"))
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    @torch.compiler.disable
    def _say(self, moment: str) -> None:
        self.at(moment)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _HELD.extend(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _HELD.extend(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


@contextmanager
def _hook(method: str, of_block: bool = False) -> Iterator[None]:
    block = _MODEL[0].blocks[1]
    handle = getattr(block if of_block else block.up, method)(lambda *_: _HELD.append(block.up.weight))
    with handle:
        yield


@contextmanager
def _parameter_hook(method: str) -> Iterator[None]:
    block = _MODEL[0].blocks[1]
    param = dict(_MODEL[0].named_parameters())["blocks.1.up.weight"]
    with getattr(param, method)(lambda value: _HELD.extend((value, block.up.weight))):
        yield


def _pack(keep: Callable[[Tensor], Tensor]) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: _HELD.append(x) or keep(x), lambda x: x)


_MODEL: list[_Model] = []

_IN_BLOCKS = (
    *("attribute", "view", "detached", "data", "container", "closure", "list", "call", "after a break", "uncompiled"),
    "result",
)
_AROUND: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: _hook(name) for name in ("register_forward_pre_hook", "register_forward_hook")},
    **{
        name: lambda name=name: _hook(name, of_block=True)
        for name in ("register_full_backward_pre_hook", "register_full_backward_hook")
    },
    **{
        name: lambda name=name: _parameter_hook(name)
        for name in ("register_hook", "register_post_accumulate_grad_hook")
    },
    "saved tensors": lambda: _pack(lambda x: x),
    "copies of saved tensors": lambda: _pack(torch.clone),
    "dispatch mode": _Dispatched,
    "function mode": _Called,
    "anomaly mode": torch.autograd.detect_anomaly,
}
_NOW: dict[str, Callable[[_Model], Any]] = {
    "an attribute": lambda model: _HELD.append(model.blocks[1].up.weight),
    "full_tensor": lambda model: [param.full_tensor().sum() for param in model.parameters()],
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": lambda model: copy.deepcopy(model)(_TOKENS),
    "functional_call": lambda model: torch.func.functional_call(model.blocks[1], {}, (torch.randn(2, _WIDTH),)),
    "apply": lambda model: model.apply(lambda module: getattr(module, "weight", torch.zeros(1)).sum()),
    "repr": lambda model: repr([model.blocks[1].up.weight, *model.parameters()]),
    "gradients": lambda model: torch.autograd.grad(model(_TOKENS), list(model.parameters())),
    "another forward": lambda model: model(_TOKENS).backward(),
}
_MOMENTS = (
    *("between blocks", "after the forward", "in the backward", "after the backward", "after the update"),
    *("next forward", "in no_grad", "in inference mode", "after a failed forward", "after a failed backward"),
    *("after a kept graph", "between two forwards"),
)


def _read() -> None:
    for block in _MODEL[0].blocks:
        left = block.left() if callable(block.left) else block.left
        _HELD.extend(tree_leaves(left))
    for value in list(_HELD):
        if type(value) in (Tensor, nn.Parameter) and value.is_floating_point():
            with suppress(RuntimeError):  # a view of what was updated since
                _ = value + 1
            value.detach().clone().sum().item()
            repr(value)


def _play(way: str, moment: str, compiled: Any, optimizer: torch.optim.Optimizer) -> None:
    (model,) = _MODEL
    done: list[bool] = []

    def look(at: str) -> None:
        if at == moment and not done:  # not in the forwards that reading runs itself
            done.append(True)
            _NOW.get(way, lambda _: None)(model)
            _read()

    model.at = look
    for block in model.blocks:
        block.way = way if way in _IN_BLOCKS else ""
    with ExitStack() as stack:
        stack.enter_context(_AROUND.get(way, nullcontext)())
        for mode, name in ((torch.no_grad, "in no_grad"), (torch.inference_mode, "in inference mode")):
            if moment == name:
                with mode():
                    compiled(_TOKENS)
        if moment == "after a failed forward":
            model.blocks[2].way = "raises"
            with suppress(ValueError):
                compiled(_TOKENS)
            model.blocks[2].way = ""
        if moment == "after a failed backward":
            with suppress(ZeroDivisionError), model.blocks[1].register_full_backward_hook(lambda *_: 1 / 0):
                compiled(_TOKENS).backward()
        look(moment if moment.startswith(("in no", "in inf", "after a failed")) else "")
        loss = compiled(_TOKENS)
        look("after the forward")
        if moment == "between two forwards":
            other = compiled(_TOKENS)
            look(moment)
            other.backward()
        loss.backward(retain_graph=moment == "after a kept graph")
        look("after a kept graph")
        look("after the backward")
        optimizer.step()
        look("after the update")
        optimizer.zero_grad()
        loss = compiled(_TOKENS)
        look("next forward")
        loss.backward()


def _in_a_fork(*args: Any) -> str:
    """Return the signal that ended a fork; empty if none did."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with suppress(BaseException):
            _play(*args)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""


@pytest.mark.timeout(900)  # more than 200 forks, of which none takes more than 60 s
def test_no_way_of_reading_a_released_parameter_ends_the_process(fake_ranks):
    torch.manual_seed(0)
    model = dsgraph.partition(_Model(), keep_whole_below=1)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _MODEL[:] = [model]
    for _ in range(2):
        compiled(_TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    ways = (*_IN_BLOCKS, *_AROUND, *_NOW)
    found = {(way, moment): _in_a_fork(way, moment, compiled, optimizer) for way in ways for moment in _MOMENTS}
    _MODEL.clear()
    ended = {pair: name for pair, name in found.items() if name}
    assert len(found) >= 200 and not ended, ended
