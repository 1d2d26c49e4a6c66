"""Tests of the ops that move tensors out of the device's memory and back."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsgraph.inductor_ext import TIERS, TransferError, Transfers, transfers_of
from dsgraph.inductor_ext.transfers import stored
from dsgraph.inductor_ext.transfers import transfers as module
from dsgraph.inductor_ext.transfers.buffer_pool import Buffer
from dsgraph.inductor_ext.transfers.lanes import CpuLane, Mark

CPU = torch.device("cpu")
ops = torch.ops.dsgraph


def store(tensor: torch.Tensor, tier: str) -> torch.Tensor:
    return ops.finish_offload(ops.offload(tensor, tier), tensor)


def start(handle: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return ops.reload(handle, like.shape, like.stride(), like.dtype, like.device)


def is_empty(transfers: Transfers) -> bool:
    transfers.settle()
    left = [path for path in transfers.folder.iterdir() if path.name.startswith("activation")]
    return not left and not transfers.host.used and not transfers.staging.used and not transfers.pending


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    """Those of the CPU, which each test must leave empty."""
    found = transfers_of(CPU)
    yield found
    assert is_empty(found)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_bytes_come_back_as_they_were(tier: str, dtype: torch.dtype, transfers: Transfers) -> None:
    given = torch.randn(3, 50, 7).to(dtype).permute(2, 0, 1)
    expected, handle = given.clone(), store(given, tier)
    given.zero_()  # the memory is used again
    found = ops.wait_transfer(start(handle, expected.as_strided(given.shape, given.stride())))
    assert torch.equal(found, expected)
    assert found.stride() == given.stride()


@pytest.mark.parametrize("tier", TIERS)
def test_a_handle_is_read_as_often_as_one_likes_and_a_result_not_ahead_of_its_wait(
    tier: str, transfers: Transfers
) -> None:
    given = torch.full((5000,), 3.0)
    handle = store(given, tier)
    first, second = start(handle, given), start(handle, given)
    first.zero_()  # until the wait, a result holds nothing by itself
    assert not torch.equal(first, given)
    assert torch.equal(ops.wait_transfer(second), given)
    assert torch.equal(ops.wait_transfer(first), given)
    with pytest.raises(TransferError, match="no reload"):
        ops.wait_transfer(first)


@pytest.mark.parametrize("tier", TIERS)
def test_what_nobody_holds_any_more_is_gone(tier: str, transfers: Transfers) -> None:
    given = torch.randn(5000)
    handle = store(given, tier)
    alias = handle.detach()
    del handle
    transfers.settle()
    assert transfers.host.used or list(transfers.folder.glob("activation-*"))
    abandoned = start(alias, given)
    assert transfers.pending == 1
    del alias, abandoned
    assert not transfers.pending


def test_a_copy_of_a_handle_is_none(transfers: Transfers) -> None:
    given = torch.randn(50)
    copy = store(given, "host").clone()
    with pytest.raises(TransferError, match="copied the handle"):
        start(copy, given)


def test_ops_have_fakes_and_a_wait_is_its_argument() -> None:
    with torch._subclasses.FakeTensorMode():
        given = torch.empty(4, 5).t()
        handle = store(given, "host")
        assert handle.device == CPU and handle.shape == (1,)
        result = start(handle, given)
        assert result.stride() == given.stride()
        assert ops.wait_transfer(result) is result


def test_host_memory_is_used_again_and_never_more_than_was_needed_at_once() -> None:
    transfers = Transfers(CPU)
    for size in (1000, 2000, 500):
        held = [transfers.store(torch.randn(size * 1024), "host") for _ in range(2)]
        del held
    assert not transfers.host.used
    assert transfers.host.held <= 2 * 2000 * 4096


def test_bytes_that_wait_to_be_written_are_bounded(tmp_path: Path) -> None:
    transfers = Transfers(CPU, root=tmp_path, writing_bytes=2**21)
    handles = [transfers.store(torch.full((2**18,), float(number)), "disk") for number in range(16)]  # 1 MiB each
    assert transfers.staging.held <= 3 * 2**20 + 2**20
    for number, handle in enumerate(handles):
        result = torch.empty(2**18)
        transfers.reload(handle, result)
        transfers.wait(result)
        assert torch.equal(result, torch.full((2**18,), float(number)))


class _LateLane(CpuLane):
    """As on a GPU: a copy out of the device was asked for, and goes on until `through`."""

    def __init__(self) -> None:
        self.through = threading.Event()

    def to_host(self, source: torch.Tensor, buffer: Buffer) -> Mark:
        return _LateMark(self.through)


class _LateMark(Mark):
    def __init__(self, through: threading.Event) -> None:
        self._through = through

    def join(self) -> None:
        pass

    def block(self) -> None:
        assert self._through.wait(60)


def test_a_buffer_is_not_used_again_while_the_device_copies_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, written = _LateLane(), list[Path]()
    monkeypatch.setattr(module, "lane_of", lambda device: lane)
    monkeypatch.setattr(stored, "write_file", lambda path, buffer: written.append(path))
    transfers = Transfers(CPU, root=tmp_path)
    handles = [transfers.store(torch.ones(1024), "disk") for _ in range(9)]  # more than there are threads
    del handles[1:]  # the step is given up
    assert transfers.staging.used == 9 * 4096
    lane.through.set()
    transfers.settle()
    assert not transfers.staging.used
    assert len(written) == 1, "nobody wants the others"


def run(program: str, folder: Path, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        **how,  # type: ignore[call-overload]
    )


STORE = """
    import os, signal, torch
    from dsgraph.inductor_ext import transfers_of, TransferError
    transfers = transfers_of(torch.device("cpu"))
    handles = [torch.ops.dsgraph.offload(torch.ones(2**18), "disk") for _ in range(4)]
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing_behind_the_next_start(tmp_path: Path) -> None:
    killed = run(STORE + "    transfers._threads.shutdown()\n    os.kill(os.getpid(), signal.SIGKILL)\n", tmp_path)
    assert killed.returncode == -9, killed.stderr
    left = list(tmp_path.rglob("activation-*"))
    assert len(left) == 4
    assert run(STORE, tmp_path).returncode == 0  # the next one, which ends by itself
    assert not list(tmp_path.rglob("process-*"))


@pytest.mark.full
def test_a_step_that_is_killed_leaves_nothing_behind_the_next_start(tmp_path: Path) -> None:
    step = """
    import os, signal, torch, dsgraph
    from torch import nn
    from dsgraph.inductor_ext import transfers_of
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)])
    options = {"codegen": "eager", "activation_offload": "disk"}
    loss = torch.compile(model, backend="dsgraph", options=options)(torch.randn(512, 256)).sum()
    transfers_of(torch.device("cpu")).settle()
    """
    killed = run(step + "os.kill(os.getpid(), signal.SIGKILL)\n", tmp_path)
    assert killed.returncode == -9, killed.stderr
    assert len(list(tmp_path.rglob("activation-*"))) >= 2
    ends = run(step + "loss.backward()\n", tmp_path)
    assert ends.returncode == 0, ends.stderr
    assert not list(tmp_path.rglob("process-*"))


def test_a_running_process_keeps_its_folder_when_another_starts(tmp_path: Path) -> None:
    first = Transfers(CPU, root=tmp_path)
    handle, given = None, torch.randn(1000)
    handle = first.store(given, "disk")
    second = Transfers(CPU, root=tmp_path)
    assert second.folder != first.folder and first.folder.is_dir()
    result = torch.empty(1000)
    first.reload(handle, result)
    first.wait(result)
    assert torch.equal(result, given)


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    limit = 2**19

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    program = """
    import torch
    from dsgraph.inductor_ext import TransferError, transfers_of
    o, x, small = torch.ops.dsgraph, torch.ones(2**18), torch.ones(2**14)
    good, bad = o.offload(small, "disk"), o.offload(x, "disk")
    try:
        y = o.wait_transfer(o.reload(bad, x.shape, x.stride(), x.dtype, x.device))
    except TransferError as error:
        print(error)
    del bad
    y = o.wait_transfer(o.reload(good, small.shape, small.stride(), small.dtype, small.device))
    assert torch.equal(y, small)
    print(len(list(transfers_of(x.device).folder.glob("activation-*"))))
    """
    found = run(program, tmp_path, preexec_fn=bound)
    assert found.returncode == 0, found.stderr
    message, files = found.stdout.splitlines()
    assert "activation-" in message and "free space there" in message
    assert files == "1"
