"""An optimizer on disk that steps while the backward runs: the same numbers, and no half of a step in silence."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import dsgraph
from dsgraph.optim.disk_optimizer import DiskOptimizer
from dsgraph.utils.errors import OffloadError
from tests.distributed.training import full
from tests.models import CASES, build

pytestmark = pytest.mark.distributed


def _train(case: str, folder: str, *, beside: bool, codegen: str = "eager", micro_batches: int = 1) -> list[Tensor]:
    torch.compiler.reset()
    offload = {"parameters": "disk", "folder": folder}
    model = dsgraph.partition(build(case), stage=3, keep_whole_below=12, offload=offload)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    # Of a chunk of several parameters, the last gradient begins the update.
    chunk_bytes = 2**14 if case == "gpt" else 64
    optimizer = DiskOptimizer(optim.AdamW(model.parameters(), lr=1e-2), folder=Path(folder), chunk_bytes=chunk_bytes)
    together = [chunk for chunk in optimizer.chunks if len(chunk.params) > 1 and None not in chunk.stored]
    assert bool(together) is (case == "gpt")
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen, begun = list[Tensor](), 0
    for step in range(3):
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            with nullcontext() if is_last else dsgraph.accumulate(model):
                loss = compiled(*CASES[case].batches(step * micro_batches + number, dist.get_rank()))
                with optimizer.beside_backward() if beside and is_last else nullcontext():
                    loss.backward()
            seen.append(loss.detach())
        begun += optimizer.begun
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert (begun > 0) is beside
    return [*seen, *(full(param.detach()) for param in model.parameters())]


def _same(case: str, folder: str, codegen: str, micro_batches: int) -> None:
    expected = _train(case, folder, beside=False, codegen=codegen, micro_batches=micro_batches)
    found = _train(case, folder, beside=True, codegen=codegen, micro_batches=micro_batches)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("case", "world", "codegen", "micro_batches"),
    [
        *(("gpt", 2, "eager", 2), ("graph_break", 2, "eager", 1)),
        pytest.param("gpt", 2, "inductor", 2, marks=[pytest.mark.inductor, pytest.mark.full]),
        *(
            pytest.param(case, world, "eager", number, marks=pytest.mark.full)
            for case in ("tied", "frozen", "uneven", "graph_break", "gpt", "dynamic_gpt", "dropout")
            for world in (1, 2)
            for number in (1, 2)
        ),
    ],
)
def test_numbers_are_those_of_a_step_behind_the_backward(ranks, case, world, codegen, micro_batches, tmp_path):
    ranks(world).run(_same, case, str(tmp_path), codegen, micro_batches)


def _model(folder: Path) -> tuple[nn.Module, DiskOptimizer]:
    torch.compiler.reset()
    offload = {"parameters": "disk", "folder": str(folder)}
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    dsgraph.partition(model, stage=3, keep_whole_below=12, offload=offload)
    optimizer = DiskOptimizer(optim.AdamW(model.parameters()), folder=folder, chunk_bytes=64)
    return torch.compile(model, backend="dsgraph", options={"codegen": "eager"}), optimizer


def _backward(model: nn.Module, optimizer: DiskOptimizer) -> None:
    loss = model(torch.randn(8, 64)).sum()
    with optimizer.beside_backward():
        loss.backward()
    assert optimizer.begun


@pytest.mark.parametrize(
    ("forgets", "said"),
    [
        (lambda model, optimizer: model(torch.randn(8, 64)), r"call optimizer\.step\(\) first"),
        (lambda model, optimizer: optimizer.zero_grad(), "has updated parameters with these gradients"),
        (lambda model, optimizer: _backward(model, optimizer), r"call optimizer\.step\(\) first"),
        (lambda model, optimizer: (model.zero_grad(), optimizer.step()), "a gradient was changed between"),
        (
            lambda model, optimizer: (next(iter(model.parameters())).grad.mul_(2), optimizer.step()),
            "a gradient was changed between",
        ),
        (
            lambda model, optimizer: (optimizer.param_groups[0].update(lr=0.5), optimizer.step()),
            "an option of the optimizer, such as its learning rate, was changed between",
        ),
    ],
    ids=["forward", "zero_grad", "backward", "zero_grad of the model", "gradient", "learning rate"],
)
def test_a_step_that_has_begun_must_be_ended_as_it_was(one_rank, forgets, said, tmp_path):
    model, optimizer = _model(tmp_path)
    _backward(model, optimizer)
    with pytest.raises(OffloadError, match=said):
        forgets(model, optimizer)


def test_a_backward_that_fails_amid_its_updates_ends_the_training(one_rank, tmp_path):
    model, optimizer = _model(tmp_path)
    x = torch.randn(8, 64, requires_grad=True)
    x.register_hook(lambda _: (_ for _ in ()).throw(ValueError("of the user")))
    loss = model(x).sum()
    with pytest.raises(ValueError, match="of the user"), optimizer.beside_backward():
        loss.backward()
    with pytest.raises(OffloadError, match=r"an earlier step or load failed, and state is lost.*of the user"):
        optimizer.step()
    with pytest.raises(OffloadError, match="was updated, and others were not"):
        model(x)


@pytest.mark.parametrize("name", ["parameters", "optimizer-state"])
def test_a_disk_that_is_lost_amid_the_updates_is_an_error_of_the_step(one_rank, tmp_path, name):
    model, optimizer = _model(tmp_path)
    _backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).sum()
    (file,) = tmp_path.rglob(name)
    file.unlink()
    with pytest.raises(OffloadError, match=f"{name} cannot be (read|written): "):
        with optimizer.beside_backward():
            loss.backward()
        optimizer.step()
    if name == "optimizer-state":  # of the parameters none was updated when the backward failed
        with pytest.raises(OffloadError, match="an earlier step or load failed"):
            optimizer.step()


def test_micro_batches_and_what_two_forwards_read_are_left_to_the_step(one_rank, tmp_path):
    model, optimizer = _model(tmp_path)
    loss = model(torch.randn(8, 64)).sum() + model(torch.randn(8, 64)).sum()
    with optimizer.beside_backward():
        loss.backward()
    assert not optimizer.begun, "the second forward's gradient arrives later"
    optimizer.step()


def test_state_is_read_while_others_compute_a_norm(one_rank, tmp_path):
    model, optimizer = _model(tmp_path)
    twin, plain = _model(tmp_path)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 64)
    for ahead, net, each in ((True, model, optimizer), (False, twin, plain)):
        for _ in range(3):
            net(x).sum().backward()
            if ahead:
                each.start_reading()
                assert each.buffer_bytes
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            each.step()
            each.zero_grad()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(full(mine.detach()), full(theirs.detach()))
