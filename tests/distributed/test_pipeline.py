"""Pipeline stages on gloo ranks against the unsplit model."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from dsgraph.parallel.pipeline.schedule_order import SCHEDULES
from dsgraph.utils.errors import OptionError, RanksDisagreeError
from examples.gpt import GPT, GPTConfig
from tests.distributed.training import full
from tests.models import VOCAB

pytestmark = pytest.mark.distributed

BATCHES, ROWS, TIME = 4, 2, 8


class Skips(nn.Module):
    """Values that skip stages, one without a gradient, a buffer, a frozen layer and a mask by name."""

    def __init__(self, *, tie: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.register_buffer("positions", torch.linspace(0, 1, TIME).unsqueeze(-1))
        if tie:
            self.head.weight = self.embedding.weight
        if frozen:
            self.layers[3].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, *, mask: dict[str, Tensor] | None = None) -> Tensor:
        early = x.cumsum(1) > 40
        first = h = self.embedding(x) + self.positions
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * early.unsqueeze(-1)
            if mask is not None:
                h = h * mask["keep"].unsqueeze(-1)
        return F.cross_entropy(self.head(h + first).flatten(0, 1), y.flatten())


class Logits(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Shared(nn.Module):
    """Residual layers through one more layer and scale, which every stage reads in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers, self.shared = nn.ModuleList(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + self.scale * torch.tanh(self.shared(torch.tanh(layer(h)) * self.scale))
        return F.cross_entropy((h @ self.embedding.weight.T).flatten(0, 1), y.flatten())


MODELS: dict[str, Any] = {
    "shared": Shared,
    "gpt": lambda: GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=4)),
    "tied": lambda: Skips(tie=True),
    "skips": Skips,
    "frozen": lambda: Skips(frozen=True),
    "kwargs": Skips,
}


def _batch(step: int, name: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, VOCAB, (BATCHES * ROWS, TIME), generator=generator) for _ in range(2))
    keep = (torch.rand(BATCHES * ROWS, TIME, generator=generator) > 0.2).float()
    return (x, y), {"mask": {"keep": keep}} if name == "kwargs" else {}


def _rows(value: Any, part: int) -> Any:
    return torch.utils._pytree.tree_map(lambda tensor: tensor[part * ROWS : (part + 1) * ROWS], value)


def _apart(mine: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value where that exceeds 1: losses of 16 have no 1e-6."""
    return float((mine - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _against_unsplit(name: str, schedule: str, stages: int, options: dict[str, Any] | None = None) -> float:
    """Trains both for three steps; the largest difference of a loss, gradient or parameter, see `_apart`."""
    torch.manual_seed(0)
    model = MODELS[name]()
    reference = copy.deepcopy(model)
    args, kwargs = _rows(_batch(0, name), 0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    piped = dsgraph.pipeline(
        *(model, mesh["pp"], args),
        example_kwargs=kwargs,
        schedule=schedule,
        stages=stages,
        microbatches=BATCHES,
        options=options,
    )
    expected = dict(reference.named_parameters())
    mine = dict(piped.named_parameters())
    held: list[Any] = [None, None]
    dist.all_gather_object(held, sorted(mine))
    assert {*held[0], *held[1]} == set(expected)
    assert all(len(names) < len(expected) for names in held)
    optimizers = [
        torch.optim.AdamW(list(values), lr=1e-2, eps=1e-3) for values in (piped.parameters(), expected.values())
    ]
    worst = 0.0
    for step in range(3):
        args, kwargs = _batch(step, name)
        loss = piped.step(*args, **kwargs)
        total = torch.zeros(())
        for part in range(BATCHES):
            rows, named = _rows((args, kwargs), part)
            (one := reference(*rows, **named) / BATCHES).backward()
            total += one.detach()
        assert torch.isfinite(loss)
        worst = max(worst, _apart(loss, total))
        for key, value in mine.items():
            assert (value.grad is None) == (expected[key].grad is None), key
            if value.grad is not None:
                assert value.grad.isfinite().all() and expected[key].grad.abs().max() > 0, key
                worst = max(worst, _apart(value.grad, expected[key].grad))
        whole = torch.nn.utils.clip_grad_norm_(expected.values(), 0.5)
        worst = max(worst, _apart(piped.clip_grad_norm_(0.5), whole))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max([worst, *(_apart(value.detach(), expected[key].detach()) for key, value in mine.items())])
    return worst


def _stages(schedule: str) -> int:
    return 4 if SCHEDULES[schedule] else 2


_COVERING = {
    ("gpt", "GPipe"),
    ("shared", "DualPipeV"),
    ("tied", "1F1B"),
    ("kwargs", "Interleaved1F1B"),
    ("tied", "ZBVZeroBubble"),
}
_MATRIX = [
    pytest.param(name, schedule, marks=() if (name, schedule) in _COVERING else pytest.mark.full)
    for name in MODELS
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("name", "schedule"), _MATRIX)
def test_steps_are_those_of_the_unsplit_model(ranks, name, schedule):
    differences = ranks(2).run(_against_unsplit, name, schedule, _stages(schedule))
    assert max(differences) <= 1e-6


@pytest.mark.parametrize(
    ("name", "schedule", "codegen"),
    [
        ("tied", "1F1B", "eager"),
        ("tied", "ZBVZeroBubble", "eager"),
        pytest.param("skips", "GPipe", "inductor", marks=pytest.mark.full),
        pytest.param("skips", "InterleavedZeroBubble", "inductor", marks=pytest.mark.full),
        pytest.param("kwargs", "DualPipeV", "eager", marks=pytest.mark.full),
        pytest.param("kwargs", "Interleaved1F1B", "eager", marks=pytest.mark.full),
    ],
)
def test_compiled_stages_are_those_of_the_unsplit_model(ranks, name, schedule, codegen):
    differences = ranks(2).run(_against_unsplit, name, schedule, _stages(schedule), {"codegen": codegen})
    assert max(differences) <= 1e-6


def _autocast(schedule: str) -> None:
    torch.manual_seed(0)
    model, mesh = Logits(), init_device_mesh("cpu", (2,))
    alone, count = copy.deepcopy(model), _stages(schedule)
    x, y = torch.randn(2, count * ROWS, 7, generator=torch.Generator().manual_seed(1))
    piped = dsgraph.pipeline(model, mesh, (x[:ROWS],), microbatches=count, loss_fn=F.mse_loss, schedule=schedule)
    plain = piped.step(x, target=y)  # in float32
    piped.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = piped.step(x, target=y)
        parts = zip(x.chunk(count), y.chunk(count), strict=True)
        losses = [F.mse_loss(alone(rows), wanted) / count for rows, wanted in parts]
    for one in losses:
        one.backward()
    expected = dict(alone.named_parameters())
    assert abs(loss - sum(losses)) <= 1e-7 and loss != plain
    for name, value in piped.named_parameters():
        assert torch.equal(value.grad, expected[name].grad), name
    piped.zero_grad()
    assert piped.step(x, target=y) == plain


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.full)])
def test_autocast_around_a_step_is_that_of_one_process(ranks, schedule):
    ranks(2).run(_autocast, schedule)


def _other_seeds() -> dict[str, float]:
    torch.manual_seed(dist.get_rank())
    model = Skips(tie=True)
    held = [weakref.ref(value) for value in model.parameters()]
    (x, y), _ = _batch(0, "tied")
    piped = dsgraph.pipeline(model, init_device_mesh("cpu", (2,)), (x[:ROWS], y[:ROWS]), microbatches=BATCHES)
    torch.manual_seed(0)
    first = dict(Skips(tie=True).named_parameters())
    for name, value in piped.named_parameters():
        assert torch.equal(value, first[name]), name
    mine = {id(value) for value in piped.parameters()}
    del model
    gc.collect()
    left = {id(value) for ref in held if (value := ref()) is not None}
    assert left <= mine, "layers of other ranks stay in memory"
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1)
    for _ in range(2):
        piped.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
    return {name: float(value.detach().double().sum()) for name, value in piped.named_parameters()}


def test_the_first_ranks_values_count_and_other_stages_leave_memory(ranks):
    one, other = ranks(2).run(_other_seeds)
    assert one["embedding.weight"] == other["embedding.weight"]


class _Slow(nn.Module):
    """Layers that take milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def _bubble() -> float:
    model, mesh = _Slow(), init_device_mesh("cpu", (2,))
    piped = dsgraph.pipeline(model, mesh, (torch.ones(256, 512),), microbatches=2)
    with pytest.raises(OptionError, match="no step has run"):
        piped.measured_bubble()
    for _ in range(2):
        piped.step(torch.ones(512, 512))
    return piped.measured_bubble()


def test_the_bubble_is_measured(ranks):
    one, other = ranks(2).run(_bubble)  # 1 / 3 of both ranks' time, if sending takes none and both have a core
    assert one == other and 0.1 < one < 0.8


def _refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model, x = Logits(), torch.ones(ROWS, 7)
    with pytest.raises(OptionError, match="1 micro-batches are fewer than 2 stages"):
        dsgraph.pipeline(model, mesh, (x,), microbatches=1)
    with pytest.raises(OptionError, match="codegen"):
        dsgraph.pipeline(model, mesh, (x,), microbatches=4, options={"codgen": "eager"})
    with pytest.raises(OptionError, match="no scalar with a gradient"):
        dsgraph.pipeline(model, mesh, (x,), microbatches=2).step(torch.ones(2 * ROWS, 7))
    with pytest.raises(OptionError, match="takes 4 stages, not 6"):
        dsgraph.pipeline(model, mesh, (x,), microbatches=8, stages=6, schedule="ZBVZeroBubble")
    with pytest.raises(RanksDisagreeError, match="run different pipelines"):
        dsgraph.pipeline(model, mesh, (x,), microbatches=2 + dist.get_rank(), loss_fn=F.mse_loss)
    with pytest.raises(OptionError, match="in 2 equal rounds, which 5 do not fill: use 4 or 6 micro-batches"):
        dsgraph.pipeline(model, mesh, (x,), microbatches=5, schedule="Interleaved1F1B")
    piped = dsgraph.pipeline(model, mesh, (x,), microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(
        RanksDisagreeError, match=r"ranks 0 and 1 would compute with different batches.*\[x: torch.float"
    ):
        piped.step(torch.full((2 * ROWS, 7), float(dist.get_rank())), target=torch.ones(2 * ROWS, 7))
    assert all(value.grad is None for value in piped.parameters())
    with pytest.raises(OptionError, match=r"2 micro-batches .* drop the uneven rest"):
        piped.step(torch.ones(3, 7), target=torch.ones(3, 7))
    with pytest.raises(OptionError, match="loss_fn needs target="):
        piped.step(torch.ones(4, 7))


def test_what_cannot_run_is_refused_before_anything_is_sent(ranks):
    ranks(2).run(_refusals)


def _other_batches(pp: int, dp: int) -> list[str]:
    mesh = init_device_mesh("cpu", (dp, pp), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    copies = {"data_parallel": mesh["dp"]} if dp > 1 else {}
    piped = dsgraph.pipeline(Logits(), mesh["pp"], (torch.ones(ROWS, 7),), microbatches=2, loss_fn=F.mse_loss, **copies)
    good, said = torch.ones(2 * ROWS, 7), []
    for bad in (good[:3], good * 2, None):  # refused by the rank itself, found by comparing, missing
        x = bad if dist.get_rank() == pp * dp - 1 else good
        with pytest.raises((RanksDisagreeError, OptionError)) as caught:
            piped.step(*(() if x is None else (x,)), target=good)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    piped.step(good, target=good)
    return said


@pytest.mark.parametrize("dp", (1, 2))
def test_a_rank_with_another_batch_in_the_first_step_is_told_on_all(ranks, dp):
    started = time.perf_counter()
    answers = ranks(2 * dp).run(_other_batches, 2, dp)
    for text in (text for said in answers for text in said):
        assert "RanksDisagreeError" in text and "compute with different batches" in text
        assert f"and {2 * dp - 1} would" in text
    assert all("refused" in said[0] and "refused" in said[2] for said in answers[-2:])
    assert time.perf_counter() - started < 50, "with a time-out of 60 s"


def _from_meta(asked: str) -> list[str]:
    """A model on the meta device, split by name, with `loss_fn`; two steps without `zero_grad` add up."""
    torch.manual_seed(0)
    reference = Logits()
    with torch.device("meta"):
        model = Logits()
    made: list[str] = []

    def materialize(name: str, tensor: Tensor) -> Tensor:
        made.append(name)
        return reference.get_parameter(name).detach().clone()

    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(ROWS * 2, 7, generator=torch.Generator().manual_seed(1))
    piped = dsgraph.pipeline(
        model, mesh, (x[:ROWS],), microbatches=2, loss_fn=F.mse_loss, split=[asked], materialize=materialize
    )
    for _ in range(2):
        loss = piped.step(x, target=x * 2)
        expected = F.mse_loss(reference(x), x * 2)
        expected.backward()
    assert abs(float(loss - expected)) <= 1e-6
    for name, value in piped.named_parameters():
        torch.testing.assert_close(value.grad, reference.get_parameter(name).grad, atol=1e-6, rtol=0)
    assert sorted(made) == sorted(piped.state_dict())
    return made


def test_only_this_ranks_parameters_get_memory(ranks):
    first, second = ranks(2).run(_from_meta, "layers.2")
    assert {name.split(".")[1] for name in first} == {"0", "1"}
    assert {name.split(".")[1] for name in second} == {"2", "3", "4", "5"}


def _two_pipelines(zero_stage: int, schedule: str) -> float:
    """Each of two pipelines has half of the rows. In double, of which only the last stage's rank sees the loss.

    Returns:
        The largest difference of a gradient, norm or parameter over three steps.
    """
    torch.manual_seed(0)
    model = Skips(tie=True, frozen=True).double()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    half = BATCHES * ROWS // 2
    part = slice(mesh["dp"].get_local_rank() * half, (mesh["dp"].get_local_rank() + 1) * half)
    (x, y), _ = _batch(0, "tied")
    example = (x[: half // 4], y[: half // 4])
    piped = dsgraph.pipeline(
        model, mesh["pp"], example, schedule=schedule, microbatches=4, data_parallel=mesh["dp"],
        zero_stage=zero_stage, keep_whole_below=20,
    )  # fmt: skip
    mine, expected = dict(piped.named_parameters()), dict(reference.named_parameters())
    if zero_stage:
        assert all(value.to_local().numel() * 2 == value.numel() for value in mine.values() if value.numel() >= 20)
    optimizers = [torch.optim.AdamW(list(each), lr=1e-2, eps=1e-3) for each in (mine.values(), expected.values())]
    worst = 0.0
    for step in range(3):
        (x, y), _ = _batch(step, "tied")
        loss = piped.step(x[part], y[part])
        whole = reference(x, y)
        whole.backward()
        torch.testing.assert_close(loss, whole.detach().float(), atol=0, rtol=1e-6)
        grads = [(full(value.grad), expected[name].grad) for name, value in mine.items() if value.requires_grad]
        pairs = [(one.clone(), other.clone()) for one, other in grads]
        pairs.append((piped.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(expected.values(), 0.5)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pairs += [(full(value.detach()), expected[name].detach()) for name, value in mine.items()]
        worst = max([worst, *(float((one - other).abs().max()) for one, other in pairs)])
    return worst


_ZERO_COVERING = {(0, "GPipe"), (1, "ZBVZeroBubble"), (2, "Interleaved1F1B"), (3, "1F1B")}
_ZERO = [
    pytest.param(stage, schedule, marks=() if (stage, schedule) in _ZERO_COVERING else pytest.mark.full)
    for stage in range(4)
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("zero_stage", "schedule"), _ZERO)
def test_zero_shards_what_two_pipelines_hold(ranks, zero_stage, schedule):
    assert max(ranks(4).run(_two_pipelines, zero_stage, schedule)) <= 1e-6
