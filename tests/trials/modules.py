"""Modules of torch and models of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pack_padded_sequence

from tests.trials.models import MLP
from tests.trials.trial import UNCOMPILED, trial
from tests.trials.user import User, everybody, full, tokens


def _train(user: User, model: nn.Module, batch: Callable[[int], tuple[Any, ...]], *, steps: int = 3) -> None:
    """Trains a model whose result is squared, on batches that depend on the step."""
    model = user.partition(model)
    run = user.compile(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(steps):
        out = run(*batch(step))
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    for name, param in model.named_parameters():
        user.note(param, name)
    for name, buffer in model.named_buffers():
        user.note(buffer, name)


@trial("batch norms of all kinds, with running statistics, on the same batch on each rank")
def batch_norms(user: User) -> None:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None, affine=False)]
    model = nn.Sequential(*layers, nn.Linear(8, 4), nn.BatchNorm1d(4, track_running_stats=False))
    _train(user, model, lambda step: (everybody(step, 4, 6),))


@trial("group norm, instance norm, layer norm, RMS norm, PReLU in a convolution net")
def norms(user: User) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.InstanceNorm2d(8, affine=True),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
    )
    _train(user, model, lambda step: (user.numbers(step, 4, 3, 6, 6),))


class Block(nn.Module):
    """A residual block that takes a time, as in diffusion models."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, inward), nn.Conv2d(inward, outward, 3, padding=1)
        self.time = nn.Linear(8, outward)
        self.skip = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + out


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0))
        self.inward = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.ModuleList([Block(4, 8), Block(8, 8)])
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.up = nn.ModuleDict({"first": Block(16, 8), "second": Block(8 + 4, 4)})
        self.outward = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], 1)
        first = self.inward(x)
        second = F.avg_pool2d(self.down[0](first, time), 2)
        deep = self.down[1](second, time)
        flat = deep.flatten(2).transpose(1, 2)
        flat = flat + self.attention(self.norm(flat), flat, flat, need_weights=False)[0]
        deep = flat.transpose(1, 2).view_as(deep)
        deep = self.up["first"](torch.cat([deep, second], 1), time)
        return self.outward(self.up["second"](torch.cat([F.interpolate(deep, scale_factor=2), first], 1), time))


@trial("a UNet of a diffusion model: skips, attention, times, a buffer of frequencies")
def unet(user: User) -> None:
    _train(user, UNet(), lambda step: (user.numbers(step, 4, 2, 4, 4), user.numbers(90 + step, 4)))


class ConvNeXt(nn.Module):
    """Depthwise convolutions, layer scale, stochastic depth, a class token, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.mix, self.norm = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        y = self.mlp(self.norm(self.mix(x.transpose(1, 2)).transpose(1, 2)))
        return self.head((x + self.scale * y)[:, 0])


@trial("a vision model as timm has them: class token, positions, layer scale, depthwise convolutions")
def vision(user: User) -> None:
    _train(user, ConvNeXt(), lambda step: (user.numbers(step, 4, 3, 8, 8),))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, proj_size=4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([5, 3]).repeat(len(x) // 2), True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.head(hidden.transpose(0, 1).flatten(1))


@trial("a bidirectional LSTM with projections over packed sequences")
def packed(user: User) -> None:
    _train(user, Packed(), lambda step: (user.numbers(step, 4, 5, 6),))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.rnn, self.gru = nn.LSTMCell(6, 8), nn.RNNCell(8, 8), nn.GRU(8, 4, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for part in x.unbind(1):
            state = self.lstm(part, state)
        return self.gru(self.rnn(state[0])[None])[0][0]


@trial("recurrent cells in a loop over time, and a GRU of two layers after them")
def cells(user: User) -> None:
    _train(user, Cells(), lambda step: (user.numbers(step, 4, 3, 6),))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8, padding_idx=0)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(out)


@trial("`nn.Transformer` with a tied head, masks, and its fast path in `eval()`")
def transformer(user: User) -> None:
    model = Translator()
    _train(user, model, lambda step: (user.rows(tokens(step, 4, 5)), user.rows(tokens(50 + step, 4, 6))))
    model.eval()
    with torch.no_grad():
        user.loss(model(user.rows(tokens(7, 4, 5)), user.rows(tokens(8, 4, 6))).square().mean())


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        x = self.layer(x, src_key_padding_mask=padding)
        return self.cross(x, key, value)[0]


@trial("`TransformerEncoder` with padding masks, nested tensors in `eval()`, attention with `kdim`, `add_bias_kv`")
def crossing(user: User) -> None:
    model = Crossing()

    def batch(step: int) -> tuple[Tensor, ...]:
        sizes = ((4, 5, 8), (4, 3, 6), (4, 3, 4))
        padding = torch.zeros(2 if not user.is_alone else 4, 5, dtype=torch.bool)
        padding[1::2, 3:] = True
        return (*(user.numbers(step + 20 * n, *size) for n, size in enumerate(sizes)), padding)

    _train(user, model, batch)
    model.eval()
    with torch.no_grad():
        user.loss(model(*batch(9)).square().mean())


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(32, 8, mode="sum"), nn.EmbeddingBag(32, 8, padding_idx=1)
        self.both, self.table = nn.Bilinear(8, 8, 4), nn.Embedding(32, 4, padding_idx=3, scale_grad_by_freq=False)

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        return self.both(self.sums(words, per_sample_weights=weights), self.means(words)) + self.table(words[:, 0])


@trial("`EmbeddingBag` with weights of samples, `Bilinear`, an embedding with a padding row")
def bags(user: User) -> None:
    _train(user, Bags(), lambda step: (user.rows(tokens(step, 4, 5)), user.numbers(step, 4, 5)))


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 8)
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(8, 32, [4, 16], div_value=2.0)
        self.labels = nn.Linear(8, 6)
        self.distance = nn.PairwiseDistance()

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.inward(x))
        steps = self.labels(hidden)[None].expand(4, -1, -1).log_softmax(-1)
        lengths = torch.full((len(x),), 4), torch.full((len(x),), 2)
        ctc = F.ctc_loss(steps, words[:, :2] % 5 + 1, *lengths, reduction="none").mean()
        triplet = F.triplet_margin_loss(hidden, hidden.flip(1), hidden.roll(1, 1), margin=3.0)
        return self.adaptive(hidden, words[:, 0]).loss + 0.1 * ctc + triplet


@trial("losses with parameters: adaptive softmax, CTC, triplets, on the same batch on each rank")
def losses(user: User) -> None:
    _train(user, Losses(), lambda step: (everybody(step, 4, 6), tokens(step, 4, 3)))


@trial("the same with different words on each rank, so that ranks use different parts of the adaptive softmax",
       refused=r"they diverge here|Every rank must run the same parts")  # fmt: skip
def parted(user: User) -> None:
    words = torch.tensor([[0, 1, 2], [5, 1, 2], [20, 2, 1], [21, 0, 1]])
    _train(user, Losses(), lambda step: (user.numbers(step, 4, 6), user.rows(words)))


class Shared(nn.Module):
    """A layer used again and again, experts chosen by the step, early exits, lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.again = nn.Linear(6, 8), nn.Linear(8, 8)
        self.same = self.again
        self.experts = nn.ModuleDict({"even": nn.Linear(8, 8), "odd": nn.Linear(8, 8)})
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.matrices = nn.ParameterDict({"a": nn.Parameter(torch.randn(8, 4)), "unused": nn.Parameter(torch.randn(8))})

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.inward(x))
        for _ in range(3):
            x = x + 0.1 * torch.tanh(self.same(self.again(x)))
        x = self.experts["odd" if step % 2 else "even"](x)
        if step == 3:
            return x @ self.matrices["a"]
        return (x * sum(self.vectors)) @ self.matrices["a"]


@trial(
    "one layer under two names and used several times, alternating experts, early exits, lists and dicts of parameters"
)
def shared(user: User) -> None:
    _train(user, Shared(), lambda step: (user.numbers(step, 4, 6), step), steps=5)


class Kinds(nn.Module):
    """Parameters of other kinds: integers, booleans, no dimension, no element."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 8)
        self.permutation = nn.Parameter(torch.randperm(8), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(8) > 0.3, requires_grad=False)
        self.temperature, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 8))
        self.table = nn.Parameter(torch.arange(32).view(8, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)[:, self.permutation] * self.mask / self.temperature
        return torch.cat([x, self.empty]) @ self.table.float()


@trial("integer and boolean parameters, parameters without dimensions or elements")
def kinds(user: User) -> None:
    _train(user, Kinds(), lambda step: (user.numbers(step, 4, 6),))


@trial("complex parameters", refused=r"parameter 'weight' is complex.*hold real and imaginary part apart")
def complex_parameters(user: User) -> None:
    model = nn.Linear(6, 8, bias=False, dtype=torch.complex64)
    user.partition(model)(torch.ones(2, 6, dtype=torch.complex64))


@trial("buffers that a forward updates: counts, moving averages, a queue", ways=UNCOMPILED)
def buffers(user: User) -> None:
    _buffers(user)


@trial("the same with the model compiled")
def buffers_compiled(user: User) -> None:
    _buffers(user)


class Remembering(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(3, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.count += 1
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        self.queue[self.count % 3] = out.detach().mean(0)
        return out - self.average


def _buffers(user: User) -> None:
    _train(user, Remembering(), lambda step: (everybody(step, 4, 6),), steps=4)


@trial("a model that holds a closure over its parameters, lambdas, functions as attributes")
def closures(user: User) -> None:
    class Closing(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.activation: Callable[[Tensor], Tensor] = torch.tanh
            self.last = lambda x: F.linear(x, self.head.weight, self.head.bias)
            self.layers = [("inward", torch.tanh), ("between", F.gelu)]

        def forward(self, x: Tensor) -> Tensor:
            for name, activation in self.layers:
                x = activation(getattr(self, name)(x))
            return self.last(self.activation(x))

    _train(user, Closing(), lambda step: (user.numbers(step, 4, 6),))


@trial("a function around the model is compiled, with the loss, and the model is called in a loop inside")
def around(user: User) -> None:
    model = user.partition(MLP(6, 8, 6))
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def whole(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for _ in range(2):
            x = x + 0.5 * model(x)
        return {"loss": F.smooth_l1_loss(x, y), "out": x}

    run = user.compile(whole)
    for step in range(3):
        found = run(user.numbers(step, 4, 6), user.numbers(50 + step, 4, 6))
        found["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(found["loss"])
    for name, param in model.named_parameters():
        user.note(full(param), name)
