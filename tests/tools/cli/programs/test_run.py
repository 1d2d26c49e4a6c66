from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsgraph.tools.cli.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]

# Says how it was run.
SPEAK = """
import os, sys
print("said", __name__, __package__, sys.argv[1:], os.environ["WORLD_SIZE"], os.environ["DSGRAPH_DUMP"])
"""
TRAIN = """
import sys
import torch, dsgraph
if "--group" in sys.argv:
    torch.distributed.init_process_group("gloo")
    print("ranks:", torch.distributed.get_world_size())
model = torch.nn.Linear(3, 2)
torch.compile(model, backend="dsgraph", options={"codegen": "eager"})(torch.randn(4, 3)).sum().backward()
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def _hears_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and all that this starts in turn."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(*arguments: str, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dsgraph", "run", *arguments],
        preexec_fn=_hears_ctrl_c,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": "7"},  # RANK is not passed on
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def _run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = _start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def test_a_script_gets_its_arguments_and_a_folder(script, tmp_path):
    code, out, _ = _run(script(SPEAK), "--dump", "d", "--", "--steps", "5", "--", "x", cwd=tmp_path)
    assert f"said __main__ None ['--steps', '5', '--', 'x'] 1 {tmp_path / 'd'}\n" in out
    assert code == 1
    assert "d holds no graph: the script has compiled nothing with backend='dsgraph'" in out


def test_a_script_of_a_package_that_imports_relatively_is_run_as_its_module(script, tmp_path):
    script("", "outer/__init__.py"), script("", "outer/inner/__init__.py"), script("X = 1", "outer/other.py")
    path = script("from ..other import X" + SPEAK, "outer/inner/train.py")
    _, out, err = _run(path, cwd=Path("/"))
    assert "said __main__ outer.inner [] 1" in out, err


def test_a_script_of_a_package_without_relative_imports_finds_its_neighbours_and_its_package(script, tmp_path):
    script("", "outer/__init__.py"), script("X = 1", "outer/other.py")
    _, out, err = _run(script("import other, outer.other" + SPEAK, "outer/train.py"), cwd=Path("/"))
    assert "said __main__ None" in out, err


def test_a_module_is_run_as_python_runs_it(script, tmp_path):
    script("", "outer/__init__.py"), script(SPEAK, "outer/train.py")
    _, out, err = _run("-m", "outer.train", cwd=tmp_path)
    assert "said __main__ outer [] 1" in out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one script to run"),
        (["nope.py"], "nope.py is not a file"),
        (["."], ". is a folder"),
        (["-m", "no.such"], "there is no module 'no.such'"),
        (["-m", "xml"], "there is no module 'xml'"),  # a package that cannot be run
        (["-m", ""], "there is no module ''"),
        (["script.py", "-m", "xml"], "give one script to run"),
        (["script.py", "--nproc", "0"], "--nproc: is '0'; it takes a whole number above 0"),
        (["script.py", "--nproc", "two"], "--nproc: is 'two'"),
        (["script.py", "--dump", "script.py"], "--dump script.py is a file"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(arguments, message, script, tmp_path, monkeypatch, capsys):
    script("raise SystemExit('was run')")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def _old_dump(folder: Path) -> Path:
    graph = folder / "rank0" / "compile1" / "joint-4-insert_zero_collectives.py"
    graph.parent.mkdir(parents=True)
    for path in (graph, graph.with_suffix(".json"), graph.parent / "compile.json", folder / "rank0"):
        if not path.exists():
            path.write_text("old")
    return graph


def test_an_older_dump_is_kept_unless_told_otherwise(script, tmp_path, monkeypatch, capfd):
    path = script("")
    graph = _old_dump(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    assert main(["run", path, "--dump", "d"]) == 2
    assert "d holds an older dump; give --overwrite" in capfd.readouterr().err
    assert graph.read_text() == "old"
    assert main(["run", path, "--dump", "d", "--overwrite"]) == 1
    assert not any((tmp_path / "d").iterdir())


@pytest.mark.parametrize("strange", ("notes.txt", "rank0/notes.txt", "rank0/compile1/weights.py", "rank0/compile1/x/y"))
def test_what_is_no_dump_is_never_deleted(strange, script, tmp_path, monkeypatch, capsys):
    path = script("")
    graph = _old_dump(tmp_path / "d")
    mine = Path(script("mine", f"d/{strange}"))
    monkeypatch.chdir(tmp_path)
    assert main(["run", path, "--dump", "d", "--overwrite"]) == 2
    assert "which is not part of a dump" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert graph.read_text() == "old"


def test_a_link_in_a_dump_is_not_followed(script, tmp_path, monkeypatch, capsys):
    path = script("")
    graph = _old_dump(tmp_path / "elsewhere")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "rank0").symlink_to(tmp_path / "elsewhere" / "rank0")
    monkeypatch.chdir(tmp_path)
    assert main(["run", path, "--dump", "d", "--overwrite"]) == 2
    assert graph.exists()


@pytest.mark.full  # the dump of a run without a group is listed below
def test_one_rank_may_form_a_group_and_its_dump_is_listed(script, tmp_path):
    code, out, err = _run(script(TRAIN), "--json", "--", "--group", cwd=tmp_path)
    assert code == 0, err
    answer = json.loads(out)  # what the script printed is elsewhere
    assert answer["script_exit_code"] == 0
    assert answer["listing"]
    assert "ranks: 1" in err
    assert (tmp_path / "dsgraph-dump" / "rank0" / "compile1" / "joint-0-before.py").is_file()


@pytest.mark.full  # tests/launch has ranks that fail
@pytest.mark.distributed
@pytest.mark.parametrize("nproc", (pytest.param("1", marks=pytest.mark.full), "2"))
def test_a_failing_script_is_reported_with_its_exit_code_and_what_it_has_dumped(nproc, script, tmp_path):
    code, out, err = _run(script(TRAIN), "--nproc", nproc, "--", "--fail", "--group", cwd=tmp_path)
    assert code == 1
    assert out.endswith("the script failed (exit code 3)\n"), out + err
    assert "no graph" not in out
    for rank in range(int(nproc)):
        assert (tmp_path / "dsgraph-dump" / f"rank{rank}" / "compile1" / "joint-0-before.py").is_file()


@pytest.mark.full
@pytest.mark.distributed
def test_the_example_runs_from_the_repository_root(tmp_path):
    sizes = ["--width=64", "--layers=1", "--heads=2", "--time=32", "--sample=1", "--eval-batches=1"]
    tiny = ["--steps=2", "--codegen=eager", *sizes]
    arguments = ["examples/train_gpt.py", "--nproc", "2", "--dump", str(tmp_path / "d")]
    code, out, err = _run(*arguments, "--", *tiny, f"--checkpoint={tmp_path / 'c'}", cwd=ROOT)
    assert code == 0, err
    assert "ZeRO-3 on 2 ranks" in out
    assert "final: loss=" in out
    assert (tmp_path / "d" / "rank1" / "compile1" / "backward-0-before.py").is_file()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("nproc", "number", "code", "stubborn"),
    [
        pytest.param("1", signal.SIGINT, 130, False, marks=pytest.mark.full),
        ("1", signal.SIGTERM, 143, True),
        ("2", signal.SIGINT, 130, False),
        pytest.param("2", signal.SIGINT, 130, True, marks=pytest.mark.full),
    ],
)
def test_an_interrupted_run_leaves_no_process_behind(nproc, number, code, stubborn, script, tmp_path):
    path = script(f"""
import os, signal, subprocess, sys, time
if {stubborn}:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
for pid in (os.getpid(), child.pid):
    open(os.path.join({str(tmp_path)!r}, f"pid{{pid}}"), "w").close()
time.sleep(600)
""")
    process = _start(path, "--nproc", nproc, cwd=tmp_path)
    expected = 2 * int(nproc)
    _wait_until(lambda: len(list(tmp_path.glob("pid*"))) == expected, seconds=60)
    pids = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert all(map(_is_alive, pids))
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    _wait_until(lambda: not any(map(_is_alive, pids)), seconds=5)


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ctrl_c_says_where_the_dump_is(script, tmp_path):
    path = script("""
import os, pathlib, time
pathlib.Path(os.environ["DSGRAPH_DUMP"], "rank0", "compile1").mkdir(parents=True)
print("dumped", flush=True)
time.sleep(600)
""")
    process = _start(path, "--dump", "d", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "dumped\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("stopped; the incomplete dump: dsgraph ls d\n")
