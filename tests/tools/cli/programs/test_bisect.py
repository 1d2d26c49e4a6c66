from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsgraph.tools.cli.main import main
from dsgraph.tools.cli.programs.bisect import report

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]

WRONG = """
import torch, dsgraph

@dsgraph.graph_pass(phase="forward")
def square_twice(gm, ctx):
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.pow.Tensor_Scalar)
    with gm.graph.inserting_after(node):
        again = gm.graph.call_function(torch.ops.aten.pow.Tensor_Scalar, (node, 2))
    again.meta.update(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return 1

def f(x):
    y = x.square()
    return y.mean()

compiled = torch.compile(f, backend="dsgraph", options={"codegen": "eager", "pipeline": [square_twice]})
loss = compiled(torch.tensor([1.0, 3.0], requires_grad=True))
loss.backward()
print("loss", loss.item())
"""


def _bisect(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dsgraph", "bisect", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_pass_is_named_with_its_node(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    code, out, err = _bisect("wrong.py", cwd=tmp_path)
    assert code == 1, err
    lines = out.splitlines()
    assert lines[0] == "loss 5.0"  # that of the program, not of the wrong pass
    assert lines[1] == "graph 1: training, wrong.py:14"
    assert lines[-1] == "pass square_twice (forward graph) changes the results of graph 1"
    assert "after pass square_twice (forward graph), 1 of 2 results differ:" in out
    assert "  output 0 differs by up to 36, allowed 5.65e-05" in lines
    assert "  first node: mean = aten.mean.default, forward graph at wrong.py:15" in lines
    assert "      return y.mean()" in lines
    assert "    made by the pass: pow_tensor_scalar = aten.pow.Tensor_Scalar(pow_1, 2)" in lines


def test_a_tolerance_is_handed_on_and_json_holds_everything(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    code, out, err = _bisect("wrong.py", "--atol", "10", "--json", cwd=tmp_path)
    assert code == 0, err
    assert "loss 5.0" in err
    answer = json.loads(out)
    assert answer["first"] is None
    (step,) = answer["graphs"][0]["steps"]
    assert (step["pass"], step["state"]) == ("square_twice", "ok")
    assert step["worst"]["largest"] == 36.0
    assert step["worst"]["allowed"] == pytest.approx(10 * 5.0, rel=1e-5)


def test_a_script_that_compiles_nothing_is_bad_input(tmp_path):
    (tmp_path / "idle.py").write_text("")
    code, out, err = _bisect("idle.py", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err == "dsgraph: nothing to compare: the script has compiled no graph with backend='dsgraph'\n"


def test_a_script_that_fails_is_reported(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(5)")
    code, out, _ = _bisect("fails.py", cwd=tmp_path)
    assert code == 1
    assert out.endswith("the script failed (exit code 5)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.py"], "nope.py is not a file"),
        ([__file__, "--rtol", "-1"], "--rtol: is '-1'; it takes a number >= 0"),
        ([__file__, "--atol", "nan"], "--atol: is 'nan'"),
        ([__file__, "--atol", "much"], "--atol: is 'much'"),
        ([__file__, "--nproc", "-2"], "--nproc"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, capsys):
    assert main(["bisect", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.full
@pytest.mark.distributed
def test_the_example_keeps_its_meaning_on_two_ranks(tmp_path):
    sizes = ["--width=32", "--layers=1", "--heads=2", "--time=16", "--sample=1", "--eval-batches=1"]
    tiny = ["--steps=1", "--codegen=eager", *sizes, f"--checkpoint={tmp_path}"]
    code, out, err = _bisect("examples/train_gpt.py", "--nproc", "2", "--", *tiny, cwd=ROOT)
    assert code == 0, out + err
    assert "graph 1: training on 2 ranks, examples/gpt.py:" in out
    assert out.endswith("no pass changes the results of 1 graph\n")


def _result(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "graph": 1,
        "rank": rank,
        "world": 2,
        "where": "model.py:3",
        "training": True,
        "called": True,
        "steps": [],
        "first": None,
        "unrepeatable": False,
        **more,
    }


def _step(name: str, state: str, largest: float | None = 0.0) -> dict[str, Any]:
    one = {"what": "output 0", "largest": largest, "allowed": 1e-5, "note": ""}
    about = {"pass": name, "phase": "joint", "codegen": "eager", "state": state, "worst": one}
    return {**about, "off": [one] if state == "off" else [], "count_off": int(state == "off"), "count": 1}


def test_the_worst_rank_counts():
    first = {"pass": "cast", "phase": "joint", "codegen": "eager", "ranks": [1], "node": None}
    results = [
        _result(1, steps=[_step("fold", "ok"), _step("cast", "off", None)], first=first),
        _result(0, steps=[_step("fold", "ok", 1e-6), _step("cast", "ok")], first=first),
    ]
    answer = report(results, 0)
    assert answer.code == 1
    rows = {line.split()[0]: line for line in answer.text.splitlines() if line}
    assert "1e-06" in rows["fold"]
    assert "not finite" in rows["OFF"]
    assert "rank 0: no difference on this rank" in answer.text
    assert "rank 1: after pass cast (joint graph), 1 of 1 results differ:" in answer.text


@pytest.mark.parametrize(("state", "does"), [("failed", "fails on graph 1"), ("off", "changes the results of graph 1")])
def test_what_is_said_is_of_the_first_pass_on_whichever_rank(state, does):
    first = {"pass": "cast", "phase": "joint", "codegen": "eager", "ranks": [1], "node": None}
    later = {**_step("sort", "failed"), "problem": "later"}
    steps = [_step("cast", "ok"), {**_step("cast", state), "problem": "no such op"}]
    results = [_result(rank, steps=[step, later], first=first) for rank, step in enumerate(steps)]
    assert report(results, 0).text.splitlines()[-1] == f"pass cast (joint graph) {does}"


def test_graphs_that_were_never_called_prove_nothing():
    answer = report([_result(0, called=False), _result(1, called=False)], 0)
    assert answer.code == 1
    assert "no graph was called, so nothing was compared" in answer.text


def test_a_program_that_cannot_be_repeated_is_no_fault_of_a_pass():
    first = {"pass": "the reference once more", "phase": "", "codegen": "eager", "ranks": [0], "node": None}
    answer = report([_result(0, first=first, unrepeatable=True)], 0)
    assert answer.code == 1
    assert "gives different results when it runs twice" in answer.text
