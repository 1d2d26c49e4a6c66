from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsgraph.tools.cli.main import main
from dsgraph.tools.cli.programs.emit import report

ROOT = Path(__file__).parents[4]

ZERO = """
import torch, torch.distributed as dist, dsgraph
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
model = dsgraph.partition(model, stage=3, keep_whole_below=0)
compiled = torch.compile(model, backend="dsgraph")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", next(model.parameters()).device)
for step in range(3):
    compiled(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    print("step", step)
"""

PLAIN = """
import sys, torch, dsgraph

torch.manual_seed(0)
x, weight = torch.randn(32, 64), torch.randn(64, 64, requires_grad=True)
compiled = torch.compile(lambda x: (x @ weight).tanh().square().mean(), backend="dsgraph", options={"codegen": "eager"})
optimizer = torch.optim.SGD([weight], lr=1.0)
for step in range(int(sys.argv[1])):
    loss = compiled(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item(), __name__, __file__, torch.cuda.is_available())
"""

# A graph that no device but the CPU can run.
REFUSED = """
import torch, dsgraph

@torch.library.custom_op("dsgraph_tests_emit::cpu_only", mutates_args=(), device_types="cpu")
def cpu_only(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

cpu_only.register_fake(torch.empty_like)
torch.compile(lambda x: cpu_only(x) + 1, backend="dsgraph")(torch.ones(4))
"""


def _run(*command: str, cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


def _emit(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    return _run("-m", "dsgraph", "emit", *arguments, cwd=cwd)


@pytest.mark.full  # tests/tools/emission has collectives
@pytest.mark.slow
@pytest.mark.inductor
def test_the_collectives_of_four_ranks_are_in_the_code(tmp_path):
    (tmp_path / "zero.py").write_text(ZERO)
    code, out, err = _emit("zero.py", "--ranks", "4", cwd=tmp_path)
    assert code == 0, out + err
    lines = out.splitlines()
    assert lines[0] == "rank 0 of 4 on cpu"
    assert lines[1].startswith("graph 1 forward, sm_90 (H100): ")  # it has ended with its first optimizer step
    folder = tmp_path / "dsgraph-kernels"
    index = json.loads((folder / "kernels.json").read_text())
    assert (index["ranks"], index["archs"]) == (4, ["sm_90"])
    forward, backward = index["graphs"]
    assert sum(forward["collectives"].values()) >= 1
    assert all("all_gather" in name for name in forward["collectives"])
    assert any("reduce_scatter" in name for name in backward["collectives"])
    for graph in (forward, backward):
        text = (folder / graph["code"]).read_text()
        for name, count in graph["collectives"].items():
            assert text.count(f"torch.ops.{name}(") == count
    assert out.count("collectives: ") == 2


@pytest.mark.full  # a whole program
@pytest.mark.slow
@pytest.mark.inductor
def test_the_program_computes_the_same_to_its_end(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    _, alone, _ = _run("plain.py", "3", cwd=tmp_path)
    code, out, err = _emit("plain.py", "--whole", "--arch", "sm_80", "--json", "--", "3", cwd=tmp_path)
    assert code == 0, out + err
    losses = [line for line in err.splitlines() if line.startswith("loss")]
    assert losses == alone.splitlines()
    assert len(set(losses)) == 3
    assert [graph["phase"] for graph in json.loads(out)["graphs"]] == ["forward", "backward"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.inductor
def test_the_example_has_no_kernel_that_must_spill(tmp_path):
    sizes = ["--width=64", "--layers=1", "--heads=2", "--time=64", f"--checkpoint={tmp_path}/checkpoint"]
    arguments = ["examples/train_gpt.py", "--arch", "sm_80,sm_90", "--out", str(tmp_path / "out")]
    code, out, err = _emit(*arguments, "--json", "--", *sizes, cwd=ROOT)
    assert code == 0, out + err
    graphs = json.loads(out)["graphs"]
    assert [(graph["phase"], graph["arch"]) for graph in graphs] == [
        *[("forward", "sm_80"), ("forward", "sm_90")],
        *[("backward", "sm_80"), ("backward", "sm_90")],
    ]
    for graph in graphs:
        for kernel in graph["kernels"]:
            spills = [config["resources"]["spill_bytes"] for config in kernel["configurations"]]
            assert not spills or min(spills) == 0
        assert any("attention" in kernel["name"] for kernel in graph["kernels"])


@pytest.mark.slow
def test_a_script_that_compiles_nothing_is_bad_input(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.py").write_text("print('idle')")
    assert main(["emit", "idle.py"]) == 2
    out, err = capfd.readouterr()
    assert out == "idle\n"
    assert err == "dsgraph: nothing to emit: the script has compiled no graph with backend='dsgraph'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.py"], "nope.py is not a file"),
        ([__file__, "--arch", "sm_75"], "--arch 'sm_75' is not known; known: sm_80 (A100 80GB), sm_90 (H100)"),
        ([__file__, "--arch", "sm_80,sm90"], "--arch 'sm90' is not known; known: sm_80"),
        ([__file__, "--ranks", "0"], "--ranks: is '0'"),
        ([__file__, "--out", __file__], "is a file; give a folder"),
        (
            [__file__, "--out", str(ROOT / "tests" / "tools" / "emission")],
            "which `dsgraph emit` did not write; give --out another folder",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["emit", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def _older_kernels(out: Path) -> list[Path]:
    older = [out / "kernels.json", out / "sm_80" / "graph1-forward.py", out / "sm_80" / "graph1-forward" / "k.0.cubin"]
    for path in older:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return older


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        pytest.param("", 2, "nothing to emit", marks=pytest.mark.full),  # said above as well
        ("raise SystemExit(3)", 1, "the older kernels are unchanged"),
        pytest.param(REFUSED, 1, "the older kernels are unchanged", marks=pytest.mark.full),
    ],
)
def test_older_kernels_are_left_where_there_are_no_new_ones(tmp_path, call, script, code, said):
    out = tmp_path / "out"
    older = _older_kernels(out)
    (tmp_path / "script.py").write_text(script)
    refused = call("emit", tmp_path / "script.py", "--out", out)
    assert (refused.code, "holds older kernels; give --overwrite" in refused.err) == (2, True)
    found = call("emit", tmp_path / "script.py", "--out", out, "--overwrite")
    assert (found.code, said in found.out + found.err) == (code, True)
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(older)
    assert {path.read_text() for path in older} == {"{}"}


@pytest.mark.full  # those that are left alone are tried below
@pytest.mark.slow
@pytest.mark.inductor
def test_older_kernels_are_replaced_by_new_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # what it keeps has the paths of another test
    out = tmp_path / "out"
    older = _older_kernels(out)
    (tmp_path / "plain.py").write_text(PLAIN)
    code, printed, err = _emit("plain.py", "--out", "out", "--overwrite", "--", "1", cwd=tmp_path)
    assert code == 0, printed + err
    assert not any(path.exists() for path in older[1:]) and not (out / "sm_80").exists()
    graphs = json.loads((out / "kernels.json").read_text())["graphs"]
    configurations = [one for graph in graphs for kernel in graph["kernels"] for one in kernel["configurations"]]
    assert configurations
    for configuration in configurations:
        cubin = out / configuration["cubin"]
        assert cubin.read_bytes()[:4] == b"\x7fELF"
        source = cubin.with_suffix("").with_suffix(".py")  # beside it, and where the debug information says
        assert f'loc("{source}"' in cubin.with_suffix(".ttir").read_text()
        assert source.is_file()


def _kernel(name: str, *spills: int) -> dict[str, Any]:
    taken = {"registers": 32, "shared_bytes": 512, "stack_bytes": 0}
    configurations = [
        {"config": "XBLOCK=1", "warps": 4, "cubin": "k.cubin", "resources": {**taken, "spill_bytes": spilled}}
        for spilled in spills
    ]
    rest = {"ops": ["a", "b"], "calls": 2, "bytes": 1500, "flops": None, "seconds": 5e-6}
    return {"name": name, "kind": "triton", "configurations": configurations, **rest}


def _index(*kernels: dict[str, Any], problem: str | None = None, code: int = 0) -> dict[str, Any]:
    about = {"graph": 1, "phase": "forward", "arch": "sm_90", "gpu": "H100", "function": "f"}
    graph = {**about, "blocks": [], "collectives": {}}
    return {"script_exit_code": code, "graphs": [{**graph, "kernels": kernels, "problem": problem}]}


def test_a_kernel_spills_when_each_configuration_does():
    fine = report(_index(_kernel("triton_poi_fused_add_mul_silu_sigmoid_3", 0, 36)), folder="out")
    assert fine.code == 0
    assert "triton_poi_fused_add_mul_s.._3" in fine.text
    assert fine.text.endswith("each kernel has a configuration that spills no registers; 1 of 2 configurations spill")
    spilling = report(_index(_kernel("k", 4, 36)), folder="out")
    assert spilling.code == 1
    assert spilling.text.endswith("1 kernels spill registers: k")


def test_what_went_wrong_is_said():
    answer = report(_index(problem="aten.x has only a kernel for the CPU", code=3), folder="out")
    assert answer.code == 1
    assert "  not emitted: aten.x has only a kernel for the CPU" in answer.text
    assert answer.text.endswith("1 of 1 graphs could not be emitted\nthe script failed (exit code 3)")
