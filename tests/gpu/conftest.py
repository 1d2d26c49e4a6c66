"""Fixtures of the GPU tests, and the file of results that `make gpu` leaves.

Without CUDA the tests are skipped. `DSGRAPH_GPU_DEVICE=cpu` rehearses them on the CPU, with gloo in place of NCCL.
`DSGRAPH_GPU_RESULTS=file.json` writes each test's outcome, seconds, message and recorded figures as it ends.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.report import describe_gpu, machine
from tests.distributed.ranks import Processes, Ranks
from tests.gpu.device import ON_CUDA, the_device

MESSAGE = 8000
"""Characters of a failure's message that the results keep: the last ones."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has no device here; a rehearsal on the CPU skips what is marked `cuda`."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if ON_CUDA and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif not ON_CUDA and item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: a rehearsal on the CPU leaves it out"))


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer of results, in the process that sees the results of all workers."""
    path = os.environ.get("DSGRAPH_GPU_RESULTS")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(path)), "gpu-results")


class Results:
    """A JSON file that holds the machine and one record for each test that has ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}
        self._machine = describe_machine()
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in one phase (setup, call, teardown) of a test."""
        row = self._tests.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "began", "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 2)
        row.update({name: value for name, value in report.user_properties if name == "figures"})
        if report.when == "call" and report.passed:
            row["outcome"] = "passed"
        if not report.passed:
            row["outcome"] = report.outcome if report.when == "call" or report.skipped else "error"
            row["message"] = str(report.longrepr)[-MESSAGE:]
        if report.failed:
            row["printed"] = "\n".join(text for name, text in report.sections if "log" not in name)[-MESSAGE:]
        if report.when == "teardown" or report.outcome != "passed":
            self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take in a file that could not be imported."""
        if report.failed:
            message = str(report.longrepr)[-MESSAGE:]
            self._tests[report.nodeid] = {"test": report.nodeid, "outcome": "error", "seconds": 0.0, "message": message}
            self._write()

    def _write(self) -> None:
        rows = sorted(self._tests.values(), key=lambda row: (row["outcome"] in ("passed", "skipped"), row["test"]))
        outcomes = [row["outcome"] for row in rows]
        count = {name: outcomes.count(name) for name in sorted(set(outcomes))}
        text = json.dumps({"machine": self._machine, "count": count, "tests": rows}, indent=1, default=str)
        new = self._path.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(self._path)


def describe_machine() -> dict[str, Any]:
    """Return the date, the device, its driver, and the versions of what computes."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"rehearsal": not ON_CUDA, **machine(["triton", "transformers"]), **describe_gpu(), "date": now}


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record(name=value)`: a figure that the results keep, also where the test fails."""
    figures: dict[str, Any] = {}
    request.node.user_properties.append(("figures", figures))

    def put(**values: Any) -> None:
        figures.update(json.loads(json.dumps(values, default=str)))
        print(*(f"{name}: {value}" for name, value in values.items()), sep="\n", flush=True)

    return put


@pytest.fixture
def device() -> torch.device:
    """The device, and a fresh compiler."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return the_device()


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone: NCCL's, or gloo's in a rehearsal."""
    backend = "nccl" if ON_CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo ranks that share the device. They are not forked: a forked process could not use CUDA."""
    processes = Processes(method="spawn")
    yield Ranks(2, processes)
    processes.stop()
