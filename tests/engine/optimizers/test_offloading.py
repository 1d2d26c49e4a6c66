"""`offload_optimizer` and `offload_param` of the configuration: the same training, with that on disk."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dsgraph
from dsgraph.optim.disk_optimizer import DiskOptimizer
from dsgraph.optim.host_optimizer import HostOptimizer
from dsgraph.utils.errors import CheckpointError, ConfigError, OffloadError
from tests.distributed.training import full
from tests.engine.memory import Grown
from tests.engine.training import CASE, config
from tests.models import build, tokens

pytestmark = pytest.mark.distributed


def _offload(device: str = "nvme", **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": device, **more}}


def _engine(
    stage: int, folder: str | None, micro_batches: int, *, parameters: bool = False, ratio: float = 0.5
) -> dsgraph.Engine:
    torch.compiler.reset()
    settings = config(stage, gradient_clipping=0.5, gradient_accumulation_steps=micro_batches)
    if folder is not None:
        settings["zero_optimization"] |= _offload(nvme_path=folder, ratio=ratio if stage == 3 else 1.0)
        if parameters:
            settings["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": folder}
    engine = dsgraph.initialize(model=build(CASE), config=settings)[0]
    assert isinstance(engine.optimizer, DiskOptimizer) is (folder is not None)
    return engine


def _train(engine: dsgraph.Engine, first: int, last: int) -> list[torch.Tensor]:
    for number in range(first, last):
        engine.backward(engine(*tokens(number, torch.distributed.get_rank())))
        engine.step()
    return [full(param.detach()) for param in engine.module.parameters()]


def _check_beside_backward(place: str) -> None:
    """Without clipping the step runs beside the last backward: the same numbers."""
    trained = []
    for folder in (None, place):
        torch.compiler.reset()
        settings = config(3, gradient_accumulation_steps=2, gradient_clipping=0.0)
        if folder is not None:
            disk = {"device": "nvme", "nvme_path": folder}
            settings["zero_optimization"] |= {"offload_optimizer": disk, "offload_param": disk}
        engine = dsgraph.initialize(model=build(CASE), config=settings)[0]
        begun = []
        for number in range(4):
            engine.backward(engine(*tokens(number, torch.distributed.get_rank())))
            begun.append(engine.optimizer.begun > 0 if folder is not None else number % 2 == 1)
            engine.step()
        assert begun == [False, True, False, True], "with the last micro-batch"
        trained.append([full(param.detach()) for param in engine.module.parameters()])
        engine.close()
    for mine, theirs in zip(*trained, strict=True):
        assert torch.equal(mine, theirs)


def test_without_clipping_the_step_runs_beside_the_backward(ranks, tmp_path):
    ranks(2).run(_check_beside_backward, str(tmp_path))


def _growth(action: Callable[[], object]) -> int:
    with Grown() as grown:
        assert action() is not None
    return grown.bytes


def _check_memory_of_checkpoints(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    width, depth = 1024, 6
    make = lambda: torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))  # noqa: E731
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings = config(3)
    settings["zero_optimization"] |= {"offload_optimizer": disk, "offload_param": disk}
    engine = dsgraph.initialize(model=make(), config=settings)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(2, width)).square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path / "first")  # what torch loads for that, it loads once
    engine.load_checkpoint(tmp_path / "first")
    each = 4 * width * width
    saving = _growth(lambda: engine.save_checkpoint(tmp_path / "second"))
    assert saving < 6 * each, f"{saving} bytes of {3 * depth * each} were in memory at once"
    assert sum(path.stat().st_size for path in (tmp_path / "second").rglob("*.distcp")) > 3 * depth * each
    expected = [full(param.detach()).clone() for param in engine.module.parameters()]
    other = dsgraph.initialize(model=make(), config=settings)[0]
    loading = _growth(lambda: other.load_checkpoint(tmp_path / "second")[0])
    assert loading < 6 * each, f"{loading} bytes of {3 * depth * each} were in memory at once"
    for param, value in zip(other.module.parameters(), expected, strict=True):
        assert torch.equal(full(param.detach()), value)
    with pytest.raises(CheckpointError, match="remove asynchronous"):
        engine.save_checkpoint(tmp_path, "copied", asynchronous=True)
    os.truncate(engine.optimizer.path, 4096)  # the kernel ends a process that reads the map of that
    with pytest.raises(CheckpointError, match=r"save .*third.*optimizer-state"):
        engine.save_checkpoint(tmp_path, "third")
    assert engine.load_checkpoint(tmp_path / "second", load_module_only=True)[0] is not None
    torch.distributed.destroy_process_group()


def test_a_checkpoint_brings_no_state_into_memory(tmp_path, monkeypatch):
    # In a new process, started as docs/guides/larger-than-memory.md says: what glibc keeps would change the figure.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_check_memory_of_checkpoints, tmp_path).result()


def _load_halfway(
    engine: dsgraph.Engine, saved: Path, monkeypatch: pytest.MonkeyPatch, *, good: int = 3, **options: Any
) -> None:
    """Let the disk fail after so many writes; the incomplete state is not saved."""
    calls = itertools.count()

    def fails(*args: Any) -> int:
        if next(calls) >= good:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*args)

    write = os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        file = "parameters" if options else "optimizer-state"
        with pytest.raises(CheckpointError, match=rf"load .*: rank 0: .*{file} cannot be written: Input/output"):
            engine.load_checkpoint(saved, **options)
    assert next(calls) > good
    half = saved.with_name("half")
    for write in (engine.save_checkpoint, engine.export):
        with pytest.raises(CheckpointError, match=r"half.*: rank 0: .*: load a checkpoint"):
            write(half)
        assert not half.exists()


def test_loading_that_fails_halfway_leaves_nothing_to_train_with(one_rank, tmp_path, monkeypatch):
    engine = _engine(3, str(tmp_path), 1, parameters=True, ratio=1.0)
    _train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "saved")
    expected = _train(engine, 2, 4)
    _load_halfway(engine, tmp_path / "saved", monkeypatch)
    with pytest.raises(OffloadError, match="was not read to its end from a checkpoint"):
        engine(*tokens(2, 0))
    with pytest.raises(OffloadError, match="an earlier step or load failed"):
        engine.optimizer.step()
    engine.load_checkpoint(tmp_path / "saved")
    for mine, theirs in zip(_train(engine, 2, 4), expected, strict=True):
        assert torch.equal(mine, theirs)
    _load_halfway(engine, tmp_path / "saved", monkeypatch, good=1, load_module_only=True)
    engine.load_checkpoint(tmp_path / "saved", load_module_only=True)  # as much as was read: the state never changed
    _train(engine, 4, 5)
    engine.save_checkpoint(tmp_path / "saved")


def test_half_a_load_is_not_saved_where_the_optimizer_alone_is_on_disk(one_rank, tmp_path, monkeypatch):
    settings = config(3, dsgraph={"compile": False})
    settings["zero_optimization"] |= _offload(nvme_path=str(tmp_path))
    engine = dsgraph.initialize(model=build(CASE), config=settings)[0]
    _train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saved")
    _load_halfway(engine, tmp_path / "saved", monkeypatch)
    engine.load_checkpoint(tmp_path / "saved")
    engine.export(tmp_path / "whole")


def _save_copies(place: str) -> None:
    settings = config(3)
    settings["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": f"{place}/disk"}
    model = torch.nn.Linear(64, 1, bias=False)  # the second rank has no row of it
    torch.compiler.reset()
    engine = dsgraph.initialize(model=model, config=settings)[0]
    engine.backward(engine(torch.ones(2, 64)).mean())
    engine.step()
    with pytest.raises(CheckpointError, match="remove asynchronous"):
        engine.save_checkpoint(f"{place}/saved", asynchronous=True)
    engine.close()


def test_a_rank_without_rows_trains_and_refuses_to_save_copies(ranks, tmp_path):
    ranks(2).run(_save_copies, str(tmp_path))


def _save_on_disk(place: str) -> None:
    engine = _engine(3, f"{place}/disk", 1, parameters=True)
    _train(engine, 0, 3)
    engine.save_checkpoint(f"{place}/saved")
    engine.close()


def _go_on(place: str) -> None:
    usual, on_disk = _engine(3, None, 1), _engine(3, f"{place}/disk", 1, parameters=True, ratio=0.8)
    usual.load_checkpoint(f"{place}/saved")
    on_disk.load_checkpoint(f"{place}/saved")
    for mine, theirs in zip(_train(on_disk, 3, 6), _train(usual, 3, 6), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.full  # tests/checkpoint/test_disk_planners.py has other ranks
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_other_ranks_and_another_ratio_go_on_from_a_checkpoint(ranks, tmp_path, saving, loading):
    ranks(saving).run(_save_on_disk, str(tmp_path))
    ranks(loading).run(_go_on, str(tmp_path))


def _check(stage: int, micro_batches: int, parameters: bool, place: str) -> None:
    usual = _engine(stage, None, micro_batches)
    on_disk = _engine(stage, f"{place}/disk", micro_batches, parameters=parameters)
    for mine, theirs in zip(_train(on_disk, 0, 4), _train(usual, 0, 4), strict=True):
        assert torch.equal(mine, theirs)
    usual.save_checkpoint(f"{place}/usual")
    on_disk.save_checkpoint(f"{place}/on_disk")
    expected = _train(usual, 4, 8)
    for saved, folder in (("on_disk", None), ("usual", f"{place}/disk")):
        engine = _engine(stage, folder, micro_batches, parameters=parameters and folder is not None)
        engine.load_checkpoint(f"{place}/{saved}")
        for mine, theirs in zip(_train(engine, 4, 8), expected, strict=True):
            assert torch.equal(mine, theirs), f"from {saved}"
        engine.close()


@pytest.mark.parametrize(
    ("stage", "micro_batches", "parameters"),
    [
        pytest.param(3, 1, True, marks=pytest.mark.full),  # other ranks and another ratio go on above
        *(
            pytest.param(*case, False, marks=pytest.mark.full)
            for case in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2))
        ),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((3, 1, False), (3, 2, False), (3, 2, True))),
    ],
)
def test_training_and_checkpoints_are_those_of_state_in_memory(ranks, stage, micro_batches, parameters, tmp_path):
    ranks(2).run(_check, stage, micro_batches, parameters, str(tmp_path))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (_offload(), r'offload_optimizer.device "nvme" needs zero_optimization.offload_optimizer.nvme_path as well'),
        (
            _offload("cpu", nvme_path="/tmp"),
            r'nvme_path needs zero_optimization.offload_optimizer.device "nvme", and it is "cpu"',
        ),
        (_offload("disk"), "zero_optimization.offload_optimizer.device"),
        (_offload(nvme_path="/tmp", ratio=1.5), "zero_optimization.offload_optimizer.ratio"),
        (_offload("none", ratio=0.5), r'ratio needs .*offload_optimizer.device "cpu" or "nvme", and it is "none"'),
        (
            {"offload_param": {"device": "cpu"}},
            "offload_param.device needs zero_optimization.stage 3, and it is 1: .* where they are used",
        ),
    ],
)
def test_what_a_configuration_cannot_have_is_refused(one_rank, section, said):
    settings = config(1)
    settings["zero_optimization"] |= section
    with pytest.raises(ConfigError, match=said):
        dsgraph.initialize(model=build(CASE), config=settings)


@pytest.mark.parametrize(("buffers", "ahead"), [({"buffer_count": 2, "buffer_size": 1e3}, 8000), ({}, 2**26)])
def test_buffers_bound_what_is_read_ahead(one_rank, tmp_path, buffers, ahead):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(6)))
    settings = config(3)
    settings["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path), **buffers}
    engine = dsgraph.initialize(model=model, config=settings)[0]
    engine.backward(engine(torch.randn(2, 256)).square().mean())
    memory = dsgraph.report(engine.module).memory
    assert memory is not None
    most = max(2 * 4 * 256**2, min(ahead, 6 * 4 * 256**2))  # the next parameter always may be on its way
    assert memory.buffers in (most, most + 4 * 256**2), "and a gradient that leaves"


def test_the_host_is_where_state_lies_already_on_the_cpu(one_rank, capsys):
    settings = config(3)
    param = {"device": "cpu", "buffer_count": 5}
    settings["zero_optimization"] |= _offload("cpu", pin_memory=True) | {"offload_param": param}
    engine = dsgraph.initialize(model=build(CASE), config=settings)[0]
    assert type(engine.optimizer) is HostOptimizer
    said = capsys.readouterr().out
    assert "offload_optimizer moves nothing: the model is trained on the CPU" in said
    assert "offload_param has no effect: the model is trained on the CPU" in said
    assert "offload_optimizer.pin_memory has no effect" in said
    assert 'offload_param.buffer_count has no effect: zero_optimization.offload_param.device is "cpu"' in said


def _on_host(stage: int, delayed: bool, how: dict[str, Any], offloads: bool = True) -> dsgraph.Engine:
    torch.compiler.reset()
    settings = config(stage, gradient_clipping=0.5, gradient_accumulation_steps=2, dsgraph=how)
    if offloads:
        settings["zero_optimization"] |= _offload("cpu")
        settings["dsgraph"] = {**settings["dsgraph"], "delayed_update": delayed}
    return dsgraph.initialize(model=build(CASE), config=settings)[0]


def _check_host(stage: int, delayed: bool, place: str, how: dict[str, Any]) -> None:
    """A checkpoint during training changes nothing, and another engine continues from it."""
    engine, whole = _on_host(stage, delayed, how), _on_host(stage, delayed, how)
    _train(engine, 0, 4)
    engine.save_checkpoint(f"{place}/host")
    expected = _train(whole, 0, 8)
    other = _on_host(stage, delayed, how)
    other.load_checkpoint(f"{place}/host")
    found = [_train(engine, 4, 8), _train(other, 4, 8)]
    if not delayed:
        found.append(_train(_on_host(stage, delayed, how, offloads=False), 0, 8))
    for params in found:
        for mine, theirs in zip(params, expected, strict=True):
            assert torch.equal(mine, theirs)
    other.close()
    after = [full(param.detach()) for param in other.module.parameters()]
    is_late = any(not torch.equal(mine, theirs) for mine, theirs in zip(after, expected, strict=True))
    assert is_late is delayed, "close applies an update that is late"


@pytest.mark.parametrize(("stage", "delayed"), [(1, True), (3, False)])
@pytest.mark.filterwarnings("ignore:delayed_update")
def test_training_and_checkpoints_with_state_on_the_host(ranks, stage, delayed, tmp_path):
    """Uncompiled: what compiled training does to gradients is the same wherever the optimizer has its state."""
    ranks(2).run(_check_host, stage, delayed, str(tmp_path), {"compile": False})


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.filterwarnings("ignore:delayed_update")
def test_compiled_training_and_checkpoints_with_state_on_the_host(ranks, stage, delayed, tmp_path):
    ranks(2).run(_check_host, stage, delayed, str(tmp_path), {"codegen": "eager"})


@pytest.mark.filterwarnings("ignore:delayed_update")
def test_a_late_update_comes_no_later_where_a_step_is_skipped(one_rank):
    trained = []
    for delayed in (True, False):
        torch.compiler.reset()
        settings = config(3, gradient_accumulation_steps=1, bf16={"enabled": True, "check_grad_overflow": True})
        settings["zero_optimization"] |= _offload("cpu")
        settings["dsgraph"] = {**settings["dsgraph"], "delayed_update": delayed}
        engine = dsgraph.initialize(model=build(CASE), config=settings)[0]
        for factor in (1.0, float("inf")):
            engine.backward(engine(*tokens(0, 0)) * factor)
            engine.step()
        assert engine.counts.skipped == 1
        trained.append([full(param.detach()) for param in engine.module.parameters()])
    for mine, theirs in zip(*trained, strict=True):
        assert torch.equal(mine, theirs)


def _planned(limit: str | None, folder: str) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)))
    settings = config(3)
    settings["dsgraph"] = {"codegen": "eager"}
    if limit is not None:
        settings["dsgraph"] |= {"memory_limit": limit, "offload_folder": folder}
    engine = dsgraph.initialize(model=model, config=settings)[0]
    assert isinstance(engine.optimizer, DiskOptimizer) is (limit is not None)
    for number in range(2):
        torch.manual_seed(number)
        engine.backward(engine(torch.randn(2, 2048)).square().mean())
        engine.step()
    return [full(param.detach()) for param in engine.module.parameters()]


@pytest.mark.full  # tests/optim/test_plan_offload.py plans, and what cannot be planned is refused below
def test_a_limit_of_memory_says_what_lies_on_disk(one_rank, tmp_path, capfd):
    expected = _planned(None, "")
    found = _planned("1500MB", str(tmp_path))  # of 805 MB of states
    assert "of the optimizer's state and 0% of parameters and gradients are stored on disk" in capfd.readouterr().out
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("section", "zero", "said"),
    [
        ({"offload_folder": "/tmp"}, {}, "offload_folder needs dsgraph.memory_limit as well"),
        (
            {"host_memory_limit": "1GB"},
            {},
            r'host_memory_limit needs the device of the model other than "cpu", and it is "cpu"',
        ),
        (
            {"delayed_update": True},
            _offload("cpu", ratio=0.5),
            r"dsgraph.delayed_update needs .*offload_optimizer.ratio 1.0, and it is 0.5",
        ),
        ({"offload_folder": "/tmp", "memory_limit": 1000}, {}, r"1,000 bytes, and half .* at least"),
        (
            {"offload_folder": "/tmp", "memory_limit": "1GB"},
            _offload(nvme_path="/tmp"),
            r'dsgraph.offload_folder needs .*offload_optimizer.device "none", and it is "nvme"',
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(one_rank, section, zero, said):
    settings = config(3)
    settings["dsgraph"] = settings.get("dsgraph", {}) | section
    settings["zero_optimization"] |= zero
    with pytest.raises(ConfigError, match=said):
        dsgraph.initialize(model=build(CASE), config=settings)


def _leave_nothing(place: str) -> None:
    """Neither files nor open files nor threads are left by engines that were closed, or only let go of."""
    disk = {"device": "nvme", "nvme_path": place}

    def look() -> tuple[int, int, list[str]]:
        gc.collect()
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("dsgraph")]
        for thread in ours:
            thread.join(10)  # the garbage collector tells threads to end, and does not wait for them
        files = sum(path.is_file() for path in Path(place).rglob("*"))
        return files, len(list(Path("/proc/self/fd").iterdir())), [it.name for it in ours if it.is_alive()]

    before = None
    for stage, closes in ((3, False), (3, True), (1, False), (1, True)):
        torch.compiler.reset()
        settings = config(stage, gradient_accumulation_steps=1)
        settings["zero_optimization"] |= {"offload_optimizer": disk, **({"offload_param": disk} if stage == 3 else {})}
        engine = dsgraph.initialize(model=build(CASE), config=settings)[0]
        engine.backward(engine(*tokens(0, torch.distributed.get_rank())))
        engine.step()
        path = engine.optimizer.path
        assert path.is_file()
        if closes:
            engine.close()
            assert not path.exists()
            with pytest.raises(OffloadError, match="was closed"):
                list(engine.optimizer.state.values())
        del engine
        torch.compiler.reset()
        found = look()
        before = before or found
        assert found == before, (stage, closes, found, before)
    assert before is not None and before[0] <= 1 and not before[2]  # the lock of the folder stays


def test_engines_leave_no_files_and_threads(ranks, tmp_path):
    ranks(1).run(_leave_nothing, str(tmp_path))


def _relative_path(place: str) -> None:
    torch.compiler.reset()
    os.chdir(place)
    engine = _engine(1, "relative", 1)
    os.environ["HOME"] = place
    os.chdir("/")
    _train(engine, 0, 1)
    assert engine.optimizer.path.is_relative_to(Path(place) / "relative")
    assert dsgraph.engine.config.zero_config.OffloadOptimizerConfig(nvme_path="~/x").nvme_path == f"{place}/x"


def test_a_relative_path_is_resolved_once(ranks, tmp_path):
    ranks(1).run(_relative_path, str(tmp_path))


def _step_on(kind: str, device: str | None, place: str) -> list[torch.Tensor]:
    torch.compiler.reset()
    settings = config(1, optimizer={"type": kind}, gradient_accumulation_steps=1)
    if device is not None:
        settings["zero_optimization"] |= _offload(device, **({"nvme_path": place} if device == "nvme" else {}))
    return _train(dsgraph.initialize(model=build(CASE), config=settings)[0], 0, 2)


def _step_elsewhere(kind: str, place: str) -> None:
    expected = _step_on(kind, None, place)
    for device in ("cpu", "nvme") if kind == "Adagrad" else ("cpu",):
        assert all(map(torch.equal, _step_on(kind, device, place), expected)), device
    if kind != "Adagrad":
        with pytest.raises(OffloadError, match=f"state of {kind}.* cannot be offloaded"):
            _step_on(kind, "nvme", place)


@pytest.mark.parametrize(
    "kind", (*(pytest.param(kind, marks=pytest.mark.full) for kind in ("Adagrad", "Adafactor")), "Muon")
)
def test_optimizers_step_where_nothing_moves(ranks, kind, tmp_path):
    ranks(1).run(_step_elsewhere, kind, str(tmp_path))
