"""Checkpoints under kill -9 and with damaged files: no wrong value is loaded, and no complete checkpoint is lost.

    python -m tests.trials.checkpoints --kills 50 --damage 200

A killed process trains a small model, saves at each step (under one tag, under new tags, asynchronously, as a pipeline
of two stages, in turn), and is killed: from outside at a random time, or at a random one of the file operations of a
save. The next process must find the newest checkpoint that was complete or a newer one, with the right values, and its
first save must leave none of the leftovers. A damaged checkpoint has one file changed; a load must name that file and
leave the engine as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from dsgraph.utils.errors import CheckpointError

WAYS = ("one tag", "new tags", "asynchronous", "pipeline", "pipeline, one tag")
KINDS = ("flipped", "cut", "emptied", "missing", "swapped", "other key", "longer", "zeros")
# File operations of a save in which a process may kill itself: names of Python's audit events.
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "fcntl.flock")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x).square().mean()


def _engine(*, is_pipeline: bool = False) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        **{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
        **{"zero_optimization": {"stage": 3}, "dsgraph": {"compile": False}},
    }
    if is_pipeline:
        settings |= {"parallel": {"pp": 2}, "zero_optimization": {"stage": 0}, "dsgraph": {"codegen": "eager"}}
        settings["gradient_accumulation_steps"] = 2

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 400])

    more = {"example": torch.zeros(2, 40)} if is_pipeline else {}
    with redirect_stdout(io.StringIO()):
        return dsgraph.initialize(model=_Net(), config=settings, lr_scheduler=schedule, **more)[0]


def _step(engine: Any) -> None:
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(engine.global_steps))
    engine.train_batch(iter([x] * engine.gradient_accumulation_steps()))


def _digest(engine: Any) -> str:
    """Return everything that a load changes."""
    found = hashlib.sha256(repr((engine.counts, engine.lr_scheduler.state_dict(), engine.get_lr())).encode())
    for param in engine.module.parameters():
        values = [
            param.detach(),
            *(engine.optimizer.state[param][key] for key in sorted(engine.optimizer.state[param])),
        ]
        for value in values:
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(
                local.contiguous().view(torch.uint8).numpy().tobytes() if local.dim() else repr(local).encode()
            )
    return found.hexdigest()


@contextmanager
def _rank(rank: int, world: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    store = dist.HashStore() if world == 1 else dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _start(function: Any, world: int, *args: Any) -> list[Any]:
    """Ranks as processes that begin with torch imported."""
    fork, port = multiprocessing.get_context("fork"), _free_port()
    ranks = [fork.Process(target=function, args=(rank, world, port, *args)) for rank in range(world)]
    for each in ranks:
        each.start()
    return ranks


def _train(rank: int, world: int, port: int, folder: str, way: str, fatal: int) -> None:
    """Resume from the latest checkpoint and save in a loop. The journal lists the checkpoints known to be complete."""
    os.close(2)
    os.open(os.devnull, os.O_WRONLY)  # what torch says of the other rank's death
    with _rank(rank, world, port):
        engine, place = _engine(is_pipeline=way.startswith("pipeline")), Path(folder)
        journal = (place.parent / "journal").open("a", buffering=1)

        def say(**what: Any) -> None:
            if rank == 0:
                journal.write(json.dumps(what) + "\n")

        digests = {}
        with redirect_stdout(io.StringIO()):
            try:
                path, client = engine.load_checkpoint(place)
            except CheckpointError as error:
                say(wrong=f"load: {error}")
                return
        if path is not None and client["digests"][rank] != _digest(engine):
            say(wrong="other values were loaded")
        say(loaded=engine.global_steps)
        left, is_first = _kill_at(fatal), True
        while True:
            _step(engine)
            said: list[Any] = [None] * world
            dist.all_gather_object(said, _digest(engine))
            digests = {number: said[number] for number in range(world)}
            left[0] = left[0] or (not is_first and fatal > 0)
            say(saves=engine.global_steps)
            tag = "last" if way in ("one tag", "pipeline, one tag") else None
            more = {"asynchronous": True} if way == "asynchronous" else {}
            engine.save_checkpoint(place, tag, {"digests": digests}, **more)
            if way == "asynchronous":
                engine.wait_for_checkpoint()
            say(complete=engine.global_steps)
            if is_first and rank == 0:
                rest = [item.name for item in place.iterdir() if item.name.startswith(".")]
                if rest:
                    say(wrong=f"left over: {rest}")
            is_first = False


def _kill_at(fatal: int) -> list[bool]:
    """Kill this process after a number of file operations, counted from where the list's item is set."""
    is_on, seen = [False], [0]

    def hook(event: str, _: Any) -> None:
        if is_on[0] and event in EVENTS:
            seen[0] += 1
            if seen[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    if fatal:
        sys.addaudithook(hook)
    return is_on


def kill(count: int, draw: random.Random) -> list[str]:
    """Kill this number of processes, each while it saves.

    Returns:
        What was wrong.
    """
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        for number in range(count + 1):
            way = WAYS[number % len(WAYS)]
            world = 2 if way.startswith("pipeline") else 1 + (number // len(WAYS) % 2)
            # An asynchronous save of one way goes on in the folder of that way.
            folder, journal = Path(root) / f"{way} {world}" / "checkpoints", Path(root) / f"{way} {world}" / "journal"
            folder.mkdir(parents=True, exist_ok=True)
            complete = max([line["complete"] for line in _lines(journal) if "complete" in line], default=0)
            begun = max([line["saves"] for line in _lines(journal) if "saves" in line], default=0)
            before = len(_lines(journal))
            fatal = draw.randrange(1, 60) if number % 2 else 0
            ranks = _start(_train, world, str(folder), way, fatal)
            _kill_when_it_saves(ranks, journal, before, fatal, draw)
            lines = _lines(journal)[before:]
            loaded = next((line["loaded"] for line in lines if "loaded" in line), None)
            wrong += [f"kill {number}, {way}, {world} ranks: {line['wrong']}" for line in lines if "wrong" in line]
            if loaded is None or not complete <= loaded <= begun:
                wrong.append(f"kill {number}, {way}: loaded {loaded}, complete was {complete}, begun {begun}")
    return wrong


def _kill_when_it_saves(ranks: list[Any], journal: Path, before: int, fatal: int, draw: random.Random) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and any(each.is_alive() for each in ranks):
        if not fatal and sum("complete" in line for line in _lines(journal)[before:]) >= 1:
            time.sleep(draw.uniform(0, 0.3))
            break
        if fatal and not all(each.is_alive() for each in ranks):
            time.sleep(draw.uniform(0, 0.05))
            break
        time.sleep(0.01)
    for each in draw.sample(ranks, len(ranks)):
        each.kill()
        each.join()


def _lines(journal: Path) -> list[dict[str, Any]]:
    text = journal.read_text() if journal.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _damage(file: Path, kind: str, other: Path, draw: random.Random) -> bool:
    """Damage a file; return False if that changes nothing."""
    before = content = file.read_bytes()
    if kind == "flipped":
        place = draw.randrange(len(content))
        content = content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    elif kind == "cut":
        content = content[: draw.randrange(len(content))]
    elif kind == "emptied":
        content = b""
    elif kind == "swapped":
        content = other.read_bytes()
    elif kind == "other key":
        keys = sorted({key for key in (b'"steps"', b'"lr"', b'"groups"', b'"files"', b'"counts"') if key in content})
        key = draw.choice(keys) if keys else b""
        content = content.replace(key, key[:-1] + b'x"', 1) if key else content
    elif kind == "longer":
        content = content + b"\n"
    elif kind == "zeros":
        content = bytes(len(content))
    file.unlink()
    if kind != "missing":
        file.write_bytes(content)
    return kind == "missing" or content != before


def _damages(rank: int, world: int, port: int, root: str, count: int, seed: int, is_pipeline: bool) -> None:
    """Damage one file per load, on the first rank; all ranks load."""
    draw, wrong, seen = random.Random(seed), list[str](), Counter[str]()
    with _rank(rank, world, port):
        engine, folder = _engine(is_pipeline=is_pipeline), Path(root) / "checkpoints"
        digests = {}
        for tag in ("global_step1", "global_step2", "global_step11"):
            _step(engine)
            engine.save_checkpoint(folder, tag, {"tag": tag})
            digests[tag] = _digest(engine)
        _step(engine)
        if rank == 0:
            shutil.copytree(folder, Path(root) / "whole")
        while sum(seen.values()) < count:
            kind, is_latest = draw.choice(KINDS), draw.random() < 0.1
            tag, other = draw.sample(sorted(digests), 2)
            names = sorted(path.name for path in (Path(root) / "checkpoints" / tag).iterdir())
            name = draw.choice([*names, "engine.json", ".metadata"])
            tag, file = ("global_step11", folder / "latest") if is_latest else (tag, folder / tag / name)
            dist.barrier()  # each rank has seen the names
            changed = [_damage(file, kind, folder / other / name, draw) if rank == 0 else None]
            dist.broadcast_object_list(changed)
            draw = random.Random(f"{seed} {sum(seen.values())} {kind} {tag} {name}")  # the first rank has drawn more
            if changed[0]:
                before = _digest(engine)
                problem = _load(engine, folder, None if is_latest else tag, file.name)
                if problem or _digest(engine) != before:
                    wrong.append(f"{kind} {tag} {file.name}: {problem or 'the engine was changed'}")
                seen[kind] += 1
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
                shutil.copytree(Path(root) / "whole", folder)
            dist.barrier()
        for tag, digest in digests.items():
            engine.load_checkpoint(folder, tag)
            if _digest(engine) != digest:
                wrong.append(f"{tag}: whole, and other values were loaded")
        if rank == 0:
            (Path(root) / "found.json").write_text(json.dumps({"wrong": wrong, "seen": seen}))


def _load(engine: Any, folder: Path, tag: str | None, name: str) -> str:
    try:
        engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        return "" if name in str(error) else f"the error does not name the file: {error}"
    return "it was loaded"


def damage(count: int, *, world: int, seed: int, is_pipeline: bool = False) -> tuple[list[str], dict[str, int]]:
    """Damage this number of files, and load each checkpoint.

    Returns:
        What was wrong, and how many were damaged in each way.
    """
    with tempfile.TemporaryDirectory() as root:
        for each in _start(_damages, world, root, count, seed, is_pipeline):
            each.join()
        found = Path(root) / "found.json"
        if not found.exists():
            return ["a rank ended in an error"], {}
        said = json.loads(found.read_text())
        return said["wrong"], said["seen"]


def main() -> int:
    """Run both trials, and print the number of wrong loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--damage", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong = kill(arguments.kills, random.Random(arguments.seed)) if arguments.kills else []
    print(f"{arguments.kills} kills during saving: {len(wrong)} wrong")
    for number, is_pipeline in ((1, False), (2, False), (2, True)) if arguments.damage else ():
        count, seed = -(-arguments.damage // 3), arguments.seed + number
        more, seen = damage(count, world=number, seed=seed, is_pipeline=is_pipeline)
        what = f"{number} ranks" + ", a pipeline" * is_pipeline
        print(f"{sum(seen.values())} damaged files, {what}: {len(more)} wrong; {seen}")
        wrong += more
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
