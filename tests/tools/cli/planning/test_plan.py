from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MODEL = ("--params", "1T", "--layers", "298", "--hidden", "17408", "--seq", "2048")
CLUSTER = ("--gpu", "a100-40gb", "--gpus", "4096")
LAYOUT = ("--tp", "8", "--pp", "64", "--dp", "8")


def test_the_page_shows_what_is_printed(call):
    guides = ROOT / "docs" / "guides"
    pages = (guides / "choose-a-layout.md").read_text() + (guides / "parallelism.md").read_text()
    shown = re.findall(
        r"^```sh\ndsgraph ((?:plan|schedule) [^\n]*)\n```\n+```text\n(.*?)^```", pages, flags=re.DOTALL | re.MULTILINE
    )
    assert len(shown) == 4
    for command, output in shown:
        assert call(*command.split()).out == output


def test_parts_links_and_times(call):
    printed = call("plan", *MODEL, *CLUSTER, *LAYOUT, "--json")
    assert printed.code == 0
    plan = printed.json
    assert plan["fits"] is True
    even = plan["memory"]["divided evenly"]
    assert even["model_states"] == even["parameters"] + even["gradients"] + even["optimizer"]
    assert [(link["axis"], link["inside"]) for link in plan["links"]] == [
        ("tensor", True),
        ("pipeline", False),
        ("data", False),
    ]
    assert plan["values"]["step"] > 0
    assert "formulas" not in plan


def test_formulas_are_explained(call):
    out = call("plan", *MODEL, *CLUSTER, *LAYOUT, "--explain").out
    assert (
        "  = micro_batches/(micro_batches + pp - 1)\n  = 512/(512 + 64 - 1)\n  = 0.890435\n  source: Megatron-LM" in out
    )
    assert "arXiv 1910.02054" in out
    formulas = call("plan", *MODEL, *CLUSTER, "--search", "--explain", "--json").json["fitting"][0]["formulas"]
    assert all(formula["source"] for formula in formulas)


def test_what_does_not_fit_is_said(call):
    printed = call("plan", *MODEL, *CLUSTER, "--tp", "8", "--pp", "32", "--dp", "16")
    assert printed.code == 1
    assert "DOES NOT FIT: " in printed.out
    nothing = call("plan", *MODEL, "--gpu", "v100-32gb", "--gpus", "16", "--heads", "272", "--search")
    assert nothing.code == 1
    assert "0 layouts fit" in nothing.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*MODEL, *CLUSTER), "--tp and --pp and --dp missing: give --tp, --pp and --dp, or --search"),
        ((*MODEL, *CLUSTER, "--tp", "8"), "--pp and --dp missing"),
        ((*MODEL, *CLUSTER, *LAYOUT, "--search"), "leave --tp and --pp and --dp out"),
        ((*MODEL, *CLUSTER, "--tp", "8", "--pp", "64", "--dp", "4"), "is 2048 GPUs, and gpus is 4096"),
        ((*MODEL, *CLUSTER, *LAYOUT, "--batch", "100"), "batch 100 is no multiple of 8"),
        ((*MODEL, *CLUSTER, *LAYOUT, "--params", "many"), "argument --params: is 'many'; it takes a whole number"),
        ((*MODEL, "--gpu", "a100", "--gpus", "8", "--search"), "gpu is 'a100'; did you mean 'a100-"),
        ((*MODEL, *CLUSTER, *LAYOUT, "--params", "1B"), "give numbers of one model"),
    ],
)
def test_bad_input(arguments, said, call):
    printed = call("plan", *arguments)
    assert (printed.code, printed.out) == (2, "")
    assert said in printed.err


def test_it_needs_no_torch():
    code = (
        "import sys; from dsgraph.tools.cli.main import main; "
        f"main({['plan', *MODEL, *CLUSTER, *LAYOUT]!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0
