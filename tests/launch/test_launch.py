"""`dsgraph launch` on two hosts: an ssh that runs its command over here, with an empty environment as sshd's is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import INTERFACE, LinkError, linked_hosts, require_hosts

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
_SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
exec {enter} env -i HOME="$HOME" PATH="$PATH" sh -c "$2"
"""
_SUM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(dist.get_rank(), total.item(), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["WORD"], sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
# Nothing of torch, so that ranks start at once.
_WAIT = """
import os, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
open(folder + "/rank" + rank, "w").close()
while not (os.path.exists(folder + "/rank0") and os.path.exists(folder + "/rank1")):
    time.sleep(0.05)
print("rank", rank, "is up", flush=True)
if rank in sys.argv[2:]:
    sys.exit(7)
time.sleep(600)
"""
STRANGE = ["a b", "", "'", '"', ";", "$(id)", "`id`", "*", "--", "-x", "\\", "é"]


class Launch:
    """A launcher that runs."""

    def __init__(self, folder: Path, source: str, *arguments: str, hosts: tuple[str, ...], enter: str = "") -> None:
        ssh, script, hostfile = folder / "bin" / "ssh", folder / "script.py", folder / "hosts"
        ssh.parent.mkdir()
        ssh.write_text(_SSH.format(enter=enter))
        ssh.chmod(0o755)
        script.write_text(source)
        hostfile.write_text("".join(f"{host} slots=4\n" for host in hosts))
        own = [f"--export=PYTHONPATH={ROOT}", "--export=OMP_NUM_THREADS=1", "--export=WORD"]
        chosen = ["--include", "@".join(f"{host}:{number}" for number, host in enumerate(hosts))] if hosts else []
        where = ["--hostfile", str(hostfile), *chosen] if hosts else ["--num_gpus", "2"]
        options, rest = (arguments[: arguments.index("SCRIPT")], arguments[arguments.index("SCRIPT") + 1 :])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsgraph", "launch", *where, *own, *options, str(script), *rest],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "WORD": "two words; $(id)"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.folder = folder

    def wait(self) -> tuple[int, str, str]:
        said, complained = self.process.communicate(timeout=240)
        return self.process.returncode, said, complained

    def wait_for_ranks(self) -> None:
        deadline = time.monotonic() + 200
        while not all((self.folder / f"rank{rank}").exists() for rank in range(2)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        """Return the processes with the script's path among their arguments, the launcher included."""
        return _processes_with(str(self.folder / "script.py"))

    def left(self) -> dict[int, str]:
        """The same, once there has been time to end."""
        deadline = time.monotonic() + 60
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def launch(tmp_path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*arguments: str, **more) -> Launch:
        started.append(Launch(tmp_path, *arguments, **more))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def _processes_with(text: str) -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found[int(path.parent.name)] = line.replace("\0", " ")
    return found


def _port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _meeting() -> list[str]:
    return ["--master_addr", "127.0.0.1", "--master_port", _port()]


def test_two_hosts_are_one_job_and_arguments_arrive_as_they_were(launch):
    code, said, complained = launch(_SUM, *_meeting(), "SCRIPT", *STRANGE, hosts=("one", "two")).wait()
    assert code == 0, complained
    expected = [f"[{host}] {n} 3.0 {n} two words; $(id) {STRANGE}" for n, host in enumerate(("one", "two"))]
    assert sorted(said.splitlines()) == expected


def test_a_host_that_fails_ends_the_other_and_gives_its_code(launch, tmp_path):
    job = launch(_WAIT, *_meeting(), "SCRIPT", str(tmp_path), "1", hosts=("one", "two"))
    code, said, complained = job.wait()
    assert code == 7 and "[one] rank 0 is up" in said, complained
    assert "dsgraph: two failed (exit code 7); the other hosts are ended" in complained
    assert not job.left()


@pytest.mark.parametrize(
    ("number", "hosts"), [(signal.SIGKILL, ("one", "two")), pytest.param(signal.SIGTERM, (), marks=pytest.mark.full)]
)
def test_nothing_outlives_the_launcher(launch, tmp_path, number, hosts):
    job = launch(_WAIT, *(_meeting() if hosts else ()), "SCRIPT", str(tmp_path), hosts=hosts)
    job.wait_for_ranks()
    assert len(job.processes()) >= 5
    job.process.send_signal(number)
    assert job.process.wait(120) == (-number if number == signal.SIGKILL else 128 + number)
    assert not job.left()


_FAILS_ONCE = """
import os, sys, time
up, failed = sys.argv[1] + "/up", sys.argv[1] + "/failed"
if not os.path.exists(failed):
    if os.environ["RANK"] == "0":
        open(up, "w").close()
        time.sleep(600)
    while not os.path.exists(up):
        time.sleep(0.05)
    open(failed, "w").close()
    sys.exit(3)
print("rank", os.environ["RANK"], "goes on", flush=True)
"""


@pytest.mark.full  # the restart is torchrun's own; the other tests see that its options arrive
def test_ranks_start_anew_on_all_hosts(launch, tmp_path):
    options = [*_meeting(), "--max_restarts", "1", "SCRIPT", str(tmp_path)]
    code, said, complained = launch(_FAILS_ONCE, *options, hosts=("127.0.0.1", "two")).wait()
    assert code == 0, complained
    assert sorted(line.partition("] ")[2] for line in said.splitlines()) == ["rank 0 goes on", "rank 1 goes on"]


@pytest.mark.full  # it takes root; the network is all that it adds to the tests above
def test_two_network_namespaces(launch):
    try:
        require_hosts()
    except LinkError as error:
        pytest.skip(str(error))
    with linked_hosts(None) as hosts:
        names = tuple(host.namespace for host in hosts)
        options = [f"--export=GLOO_SOCKET_IFNAME={INTERFACE}", "--master_addr", "10.0.0.1", "SCRIPT"]
        code, said, complained = launch(_SUM, *options, hosts=names, enter='ip netns exec "$1"').wait()
    assert code == 0, complained
    assert sorted(line.split()[:3] for line in said.splitlines()) == [
        [f"[{n}]", str(k), "3.0"] for k, n in enumerate(names)
    ]
