"""Checkpoints under faults: ranks that are killed, a disk that is full, files that are cut off or changed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import dsgraph
from dsgraph.utils.files import write_whole
from tests.models import build

from .training import CASE, batches, config

pytestmark = pytest.mark.distributed

STEPS = 40


def _train(folder: str, steps: int, say: bool = False) -> list[float]:
    """Goes on from the latest checkpoint, saves at each step, and returns the losses of all steps so far."""
    engine = dsgraph.initialize(model=build(CASE), config=config(3))[0]
    _, client = engine.load_checkpoint(folder)
    losses = client.get("losses", [])
    assert len(losses) == engine.global_steps
    data = batches(0, engine.global_steps)
    while engine.global_steps < steps:
        losses.append(float(engine.train_batch(data)))
        if say and dist.get_rank() == 0:
            print(f"saves {engine.global_steps}", flush=True)
        engine.save_checkpoint(folder, tag=f"at{engine.global_steps % 3}", client_state={"losses": losses})
    return losses


def main() -> None:
    """One rank of a script that is killed."""
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} is {os.getpid()}", flush=True)
    losses = _train(sys.argv[1], STEPS, say=True)
    if dist.get_rank() == 0:
        write_whole(Path(sys.argv[1]) / "done.json", json.dumps(losses).encode())


def _killed_amid_saving(folder: Path, draw: random.Random) -> None:
    """Starts the script, waits for some saves, and kills one of its ranks a moment into the next."""
    command = [
        sys.executable,
        "-m",
        "dsgraph",
        "run",
        "--nproc",
        "2",
        "--dump",
        str(folder.parent / "dump"),
        "--overwrite",
        "-m",
        "tests.engine.test_faults",
        "--",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
        ranks: dict[int, int] = {}
        saves, wanted = 0, draw.randrange(1, 4)
        assert ran.stdout is not None
        for line in ran.stdout:
            words = line.split()
            if "is" in words and "rank" in words:
                ranks[int(words[words.index("rank") + 1])] = int(words[-1])
            saves += "saves" in words
            if saves >= wanted and len(ranks) == 2:  # one rank may save before the other's line is here
                time.sleep(draw.uniform(0, 0.1))
                os.kill(ranks[draw.randrange(2)], signal.SIGKILL)
                break
        else:
            assert (folder / "done.json").exists(), "the script ran to its end"
        reader = threading.Thread(target=ran.stdout.read)
        reader.start()
        ran.wait(timeout=60)
        reader.join()
    for pid in ranks.values():
        assert not Path(f"/proc/{pid}").exists(), "no rank is left"


@pytest.mark.full  # 21 starts of a script
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_at_random_moments_of_saving_nothing_is_lost(ranks, tmp_path):
    expected = ranks(2).run(_train, str(tmp_path / "undisturbed"), STEPS)[0]
    folder, draw = tmp_path / "disturbed", random.Random(0)
    folder.mkdir()
    for _ in range(20):
        if (folder / "done.json").exists():
            break
        _killed_amid_saving(folder, draw)
    assert ranks(2).run(_train, str(folder), STEPS)[0] == pytest.approx(expected, rel=1e-6)


def _on_a_full_disk(folder: str, free: int, asynchronous: bool) -> None:
    engine = dsgraph.initialize(model=build(CASE), config=config(3))[0]
    data = batches(0)
    engine.train_batch(data)
    engine.save_checkpoint(folder, "good")
    before = float(engine.train_batch(data))
    if dist.get_rank() == 0:
        filler = Path(folder) / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"0" * 4096):
                    pass
            except OSError:
                os.ftruncate(file.fileno(), file.tell() - free)
    dist.barrier()
    with pytest.raises(
        dsgraph.CheckpointError,
        match=r"save .*bad: rank \d: .*([Nn]o space left on device|[\d,]+ bytes are free there)",
    ):
        engine.save_checkpoint(folder, "bad", asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()  # nothing is being written any more
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["filler", "good", "latest"], "the disk is free"
    again = dsgraph.initialize(model=build(CASE), config=config(3))[0]
    assert again.load_checkpoint(folder)[0] == f"{folder}/good"
    assert float(again.train_batch(batches(0, 1))) == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(
    ("free", "asynchronous"),
    [
        pytest.param(0, False, id="before the tensors"),
        pytest.param(6 * 4096, False, id="between two tensors", marks=pytest.mark.full),  # the thread does the same
        pytest.param(6 * 4096, True, id="between two tensors, in the thread"),
    ],
)
def test_a_full_disk_is_an_error_and_the_checkpoint_before_stays(ranks, tmp_path, free, asynchronous):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a small file system takes the rights of root")
    try:
        ranks(2).run(_on_a_full_disk, str(tmp_path), free, asynchronous)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


if __name__ == "__main__":
    main()
