"""`examples/train_gpt.py` as its user runs it: a command, its exit code and what it prints."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples import train_gpt

ROOT = Path(__file__).parents[2]
FINAL = re.compile(r"final: loss=(\d+\.\d+) val_loss=(\d+\.\d+) tokens_per_s=(\d+) peak_mb=(\d+)")
TINY = [
    "--codegen=eager",
    "--width=64",
    "--layers=1",
    "--heads=2",
    "--time=32",
    "--batch=12",
    "--lr=0.02",
    "--warmup=2",
    "--steps=8",
    "--save-every=4",
    "--log-every=1",
    "--eval-batches=2",
    "--sample=8",
]

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Run:
    """The output of a run: the loss of every step, and the numbers of its last line."""

    text: str
    losses: dict[int, float]
    loss: float
    val_loss: float


def _start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "examples.train_gpt", *TINY, f"--checkpoint={folder}", *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def _run(folder: Path, *arguments: str) -> Run:
    done = _start(folder, *arguments)
    assert done.returncode == 0, done.stderr
    last = FINAL.fullmatch(done.stdout.rstrip("\n").rpartition("\n")[2])
    assert last, done.stdout
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d: loss ([\d.]+)", done.stdout, re.M)}
    return Run(done.stdout, losses, float(last[1]), float(last[2]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Two ranks, eight steps, checkpoints after the fourth and the eighth."""
    folder = tmp_path_factory.mktemp("finished")
    return _run(folder, "--nproc=2"), folder


@pytest.fixture
def interrupted(finished: tuple[Run, Path], tmp_path: Path) -> Path:
    """The files of that run when it is interrupted during its second checkpoint: `latest` still names the first."""
    folder = tmp_path / "interrupted"
    shutil.copytree(finished[1], folder)
    latest = json.loads((folder / "latest").read_text())
    assert (latest["slot"], latest["step"]) == ("b", 8)
    for shard in (folder / "b").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:100])
    (folder / "latest").write_text(json.dumps({**latest, "slot": "a", "step": 4}))
    return folder


def test_one_rank_learns_and_prints_its_figures(tmp_path):
    """The smallest run; what differs on two ranks is tried by tests/distributed/test_stages.py."""
    sizes = ["--width=16", "--time=16", "--steps=3", "--save-every=3", "--eval-batches=1", "--sample=0"]
    run = _run(tmp_path, "--nproc=1", *sizes)
    assert list(run.losses) == [1, 2, 3]
    assert run.losses[1] == pytest.approx(math.log(256), abs=0.3)
    assert run.loss == run.losses[3] < run.losses[1]


@pytest.mark.full  # one rank above
def test_two_ranks_learn_and_print_their_figures(finished):
    run, _ = finished
    assert list(run.losses) == list(range(1, 9))
    assert run.losses[1] == pytest.approx(math.log(256), abs=0.3)
    assert run.losses[8] < run.losses[1] - 0.5
    assert run.loss == run.losses[8]
    assert "\ndef " in run.text  # the sample


@pytest.mark.full  # tests/checkpoint/test_save.py has resumed runs
@pytest.mark.parametrize("nproc", (2, pytest.param(1, marks=pytest.mark.full)))
def test_resumed_equals_uninterrupted(finished, interrupted, nproc):
    whole, _ = finished
    rest = _run(interrupted, f"--nproc={nproc}", "--resume")
    assert list(rest.losses) == [5, 6, 7, 8]
    slack = 0 if nproc == 2 else 0.002  # other sums over ranks
    for step, loss in rest.losses.items():
        assert loss == pytest.approx(whole.losses[step], abs=slack), step
    assert rest.val_loss == pytest.approx(whole.val_loss, abs=slack)


@pytest.mark.full  # test_stages compares with one process
def test_single_process_without_dsgraph_gives_the_same_losses(finished, tmp_path):
    whole, _ = finished
    alone = _run(tmp_path, "--single")
    assert alone.losses == pytest.approx(whole.losses, abs=0.002)
    assert alone.val_loss == pytest.approx(whole.val_loss, abs=0.002)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--resume"], "--resume found no checkpoint in", marks=pytest.mark.full),
        pytest.param(["--warmup=-1"], "--warmup is -1; it takes a number of 0 or more", marks=pytest.mark.full),
        pytest.param(["--time=99999"], "--time is 99999; it takes less than 10000", marks=pytest.mark.full),
        (["--batch=9"], "--batch is 9, which 2 ranks cannot share evenly"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_gpt", *TINY, f"--checkpoint={tmp_path}", *arguments])
    with pytest.raises(SystemExit) as refused:
        train_gpt.main()
    out, err = capsys.readouterr()
    assert (refused.value.code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.full
def test_llama_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    run = _run(tmp_path, "--model=llama")
    assert run.losses[8] < run.losses[1] - 0.3
