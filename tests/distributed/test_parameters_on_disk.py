"""`partition(offload=...)`: the same training with parameters, gradients and optimizer state on disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import Shard

import dsgraph
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.optim.disk_optimizer import DiskOptimizer
from dsgraph.utils.errors import OffloadError, PartitionError
from tests.models import CASES, build

from .training import full

pytestmark = pytest.mark.distributed


def _train(
    case: str, folder: str | None, *, codegen: str, steps: int = 3, micro_batches: int = 2, ratio: float = 1.0
) -> list[Tensor]:
    torch.compiler.reset()
    offload = None if folder is None else {"parameters": "disk", "folder": folder, "ratio": ratio}
    model = dsgraph.partition(build(case), stage=3, keep_whole_below=12, offload=offload)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    if folder is not None:
        optimizer = DiskOptimizer(optimizer, folder=Path(folder), chunk_bytes=4096)
    seen = []
    for step in range(steps):
        for number in range(micro_batches):
            loss = compiled(*CASES[case].batches(step * micro_batches + number, dist.get_rank()))
            loss.backward()
            seen.append(loss.detach())
        seen.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    sharded = [param for param in model.parameters() if isinstance(param.placements[0], Shard)]
    on_disk = [stored_rows(param.to_local()) is not None for param in sharded if param.to_local().numel()]
    assert any(on_disk) is (folder is not None)
    assert all(on_disk) is (folder is not None and ratio == 1)
    return [*seen, *(full(param.detach()) for param in model.parameters())]


def _same(case: str, folder: str, codegen: str, ratio: float = 1.0) -> None:
    # Of a parameter of two graphs, autograd adds both gradients up before it adds them to the last micro-batch's.
    micro_batches = 1 if case == "graph_break" else 2
    expected = _train(case, None, codegen=codegen, micro_batches=micro_batches)
    found = _train(case, folder, codegen=codegen, micro_batches=micro_batches, ratio=ratio)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


_CASES = ["tied", "frozen", "uneven", "graph_break", "gpt", "dynamic_gpt", "dropout"]


@pytest.mark.parametrize(
    ("case", "world", "codegen"),
    [
        *(("tied", 2, "eager"), ("graph_break", 2, "eager")),
        pytest.param("frozen", 2, "inductor", marks=[pytest.mark.inductor, pytest.mark.full]),
        *(pytest.param(case, world, "eager", marks=pytest.mark.full) for case in _CASES for world in (1, 2)),
        *(pytest.param(case, 2, "inductor", marks=pytest.mark.full) for case in _CASES),
    ],
)
def test_numbers_are_those_of_training_in_memory(ranks, case, world, codegen, tmp_path):
    ranks(world).run(_same, case, str(tmp_path), codegen)


@pytest.mark.full  # the first parameters lie on disk until the share is full
def test_a_share_of_the_parameters_may_lie_on_disk(ranks, tmp_path):
    ranks(2).run(_same, "gpt", str(tmp_path), "eager", 0.5)


def test_the_first_parameters_lie_on_disk_until_the_share_is_full(one_rank, tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    offload = {"parameters": "disk", "folder": str(tmp_path), "ratio": 0.5}
    dsgraph.partition(model, stage=3, keep_whole_below=12, offload=offload)
    found = [stored_rows(param.to_local()) is not None for param in model.parameters()]
    assert found == [True, True, False, False]


def _on_disk(folder: Path, model: nn.Module | None = None) -> nn.Module:
    offload = {"parameters": "disk", "folder": str(folder)}
    return dsgraph.partition(model or nn.Linear(64, 64), stage=3, keep_whole_below=12, offload=offload)


def test_a_model_of_the_meta_device_goes_to_disk_as_it_is_initialised(one_rank, tmp_path):
    torch.manual_seed(3)
    expected = nn.Linear(64, 64)
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    _on_disk(tmp_path, model)
    torch.manual_seed(3)
    dsgraph.materialize(model, "cpu")
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert stored_rows(mine.to_local()) is not None
        assert torch.equal(full(mine.detach()), theirs)


def test_gradients_are_read_and_written_as_any_other(one_rank, tmp_path):
    model = _on_disk(tmp_path)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    x = torch.randn(8, 64)
    compiled(x).sum().backward()
    grads = [full(param.grad).clone() for param in model.parameters()]
    assert torch.equal(grads[0], x.sum(0).expand(64, 64))
    for param in model.parameters():
        param.grad.mul_(2)
    compiled(x).sum().backward()  # adds
    model(x).sum().backward()  # and so does eager code
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(full(param.grad), 4 * grad)


def test_gradients_that_would_go_elsewhere_are_refused(one_rank, tmp_path):
    model = _on_disk(tmp_path)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    with pytest.raises(OffloadError, match=r"is only written to its \.grad"):
        torch.autograd.grad(compiled(torch.randn(8, 64)).sum(), list(model.parameters()))


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
@pytest.mark.parametrize("what", ["the file", "the folder"])
def test_a_disk_that_is_lost_ends_in_an_error(one_rank, tmp_path, phase, what):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = _on_disk(tmp_path, model)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    optimizer = DiskOptimizer(optim.AdamW(model.parameters()), folder=tmp_path)
    x = torch.randn(8, 64)

    def run(place: str) -> None:
        if place == "forward":
            run.loss = compiled(x).sum()
        elif place == "backward":
            run.loss.backward()
        else:
            optimizer.step()
            optimizer.zero_grad()

    phases = ["forward", "backward", "step"]
    for place in [*phases, *phases[: phases.index(phase)]]:
        run(place)
    (file,) = tmp_path.rglob("parameters")
    if what == "the file":
        file.unlink()
    else:
        shutil.rmtree(file.parent)
    with pytest.raises(OffloadError, match=r"(parameters|optimizer-state) cannot be read: .* load the last checkpoint"):
        run(phase)


@pytest.mark.parametrize(
    ("offload", "stage", "said"),
    [
        ({"parameters": "tape"}, 3, "it takes"),
        ({"parameters": "host"}, 1, "stage 1 holds gathered copies"),
        ({"folder": "/tmp"}, 3, "one of the first two has to be there"),
        ({"optimizer": "host", "ratio": {"gradients": 0.5}}, 3, "the ratio may be one for each"),
        ({"optimizer": "host", "folder": "/tmp"}, 3, "the folder has no effect"),
        ({"parameters": "disk", "folder": "/tmp"}, 2, "stage 2 holds gathered copies"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(one_rank, offload, stage, said):
    with pytest.raises(PartitionError, match=said):
        dsgraph.partition(nn.Linear(64, 64), stage=stage, offload=offload)


def test_on_the_host_parameters_of_a_model_on_the_cpu_lie_anyway(one_rank):
    model = dsgraph.partition(nn.Linear(256, 256), stage=3, offload={"parameters": "host"})
    assert not any(stored_rows(param.to_local()) for param in model.parameters())
    assert "parameters on the host: nothing is moved" in dsgraph.report(model).status
    with torch.device("meta"):
        gone = nn.Linear(256, 256)
    dsgraph.partition(gone, stage=3, offload={"parameters": "host"})
    with pytest.raises(
        PartitionError, match="the model is to be on cuda; parameters can only be offloaded from the CPU"
    ):
        dsgraph.materialize(gone, "cuda")


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_allocated(one_rank, tmp_path):
    with torch.device("meta"):
        model = nn.Linear(2**21, 2**21)
    with pytest.raises(OffloadError, match=r"parameters: \d+ bytes cannot be reserved"):
        _on_disk(tmp_path, model)


@pytest.mark.parametrize(
    ("phase", "function", "number", "said"),
    [
        *((phase, "preadv", errno.EIO, "read: Input/output error") for phase in ("forward", "backward", "step")),
        *((phase, "pwritev", errno.ENOSPC, "written: No space left on device") for phase in ("backward", "step")),
    ],
)
def test_a_disk_that_fails_in_mid_run_is_an_error_of_that_step(
    one_rank, tmp_path, monkeypatch, phase, function, number, said
):
    model = _on_disk(tmp_path, nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    optimizer = DiskOptimizer(optim.AdamW(model.parameters()), folder=tmp_path)
    x = torch.randn(8, 64)

    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    def train(fault: str) -> None:
        for place in ("forward", "backward", "step"):
            if place == fault:
                monkeypatch.setattr(os, function, fails)
            if place == "forward":
                loss = compiled(x).sum()
            elif place == "backward":
                loss.backward()
            else:
                optimizer.step()
        optimizer.zero_grad()

    train("")
    with pytest.raises(OffloadError, match=rf"(parameters|optimizer-state) cannot be {said}.* load the last"):
        train(phase)


_KILLED = """
    import contextlib, os, signal, sys, threading, torch, dsgraph
    import torch.distributed as dist
    from pathlib import Path
    from dsgraph.optim.disk_optimizer import DiskOptimizer

    def reached(phase):
        if phase == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)

    class Adam(torch.optim.Adam):
        def step(self):
            super().step()
            if threading.current_thread() is not threading.main_thread():
                reached("overlapped step")
            reached("step")  # the first chunk is not written back, the second one is on its way

    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    offload = {"parameters": "disk", "folder": sys.argv[1]}
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model = dsgraph.partition(model, stage=3, keep_whole_below=12, offload=offload)
    reached("partition")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    optimizer = DiskOptimizer(Adam(model.parameters()), folder=Path(sys.argv[1]), chunk_bytes=4096)
    loss = compiled(torch.randn(8, 64)).sum()
    reached("forward")
    with optimizer.beside_backward() if "overlapped" in sys.argv[2] else contextlib.nullcontext():
        loss.backward()
    reached("backward")
    optimizer.step()
"""


@pytest.mark.full  # tests/inductor_ext/transfers/test_ops.py kills a process
@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        "overlapped step",
        *(pytest.param(p, marks=pytest.mark.full) for p in ("partition", "forward", "backward", "step")),
    ],
)
def test_what_a_killed_process_leaves_goes_with_the_next_start(one_rank, tmp_path, phase):
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(_KILLED), str(tmp_path), phase], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.rglob("parameters")
    _on_disk(tmp_path)
    assert not left.exists()
    assert len(list(tmp_path.rglob("parameters"))) == 1
    assert not list(tmp_path.rglob("optimizer-state"))
    assert str(os.getpid()) in next(tmp_path.rglob("parameters")).parent.name
