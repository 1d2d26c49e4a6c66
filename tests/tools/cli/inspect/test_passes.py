from __future__ import annotations

import json
from typing import Any

import pytest

import dsgraph
from dsgraph.compiler.build_pipeline import built_in_passes
from dsgraph.passes import Phase
from dsgraph.passes.zero.bucket_small_reductions import BucketSmallReductions
from dsgraph.tools.cli.main import main

PIPELINE = """
from dataclasses import dataclass
from typing import ClassVar
import dsgraph

@dataclass(frozen=True)
class FoldCasts(dsgraph.GraphPass):
    '''Fold casts.

    before:  a
    after:   b
    '''

    phase: ClassVar[dsgraph.Phase] = dsgraph.Phase.JOINT
    eats_casts: ClassVar[bool] = True
    limit: int = 7
    must: str = ""

    def run(self, gm, ctx):
        return dsgraph.PassResult()

@dsgraph.graph_pass(phase="backward", requires={"folded"}, reorders_collectives=True)
def shuffle(gm, ctx):
    '''Shuffles.'''
    return 0

LIST = dsgraph.default_pipeline() + FoldCasts(limit=9)
ONE = FoldCasts()
def make(): return [FoldCasts()]
BAD = [shuffle]
NUMBER = 3
FOLD = FoldCasts
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"passes_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PIPELINE)
    return name


def _json(capsys: Any, *arguments: str) -> Any:
    assert main(["passes", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_pass_is_listed_in_the_order_in_which_they_run(capsys):
    listed = _json(capsys)
    assert [item["name"] for item in listed if item["origin"] == "default"] == [
        item.name for item in dsgraph.default_pipeline()
    ]
    assert {item["class"] for item in listed} == {kind.__name__ for kind in built_in_passes()}
    order = [phase.value for phase in Phase]
    assert [item["phase"] for item in listed] == sorted((item["phase"] for item in listed), key=order.index)


def test_a_row_has_phase_contract_and_options(capsys):
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (bucket,) = (index for index, line in enumerate(lines) if line.startswith("bucket_small_reductions"))
    row = "\n".join(lines[bucket : bucket + 3])
    for text in ("joint", "default", "provides bucketed-small-reductions", "conflicts zero-collectives"):
        assert text in row
    assert f"bucket_bytes: int = {BucketSmallReductions().bucket_bytes}" in row
    (prefetch,) = (index for index, line in enumerate(lines) if line.startswith("prefetch_forward_gathers"))
    assert any("reorders_collectives" in line for line in lines[prefetch : prefetch + 3])


@pytest.mark.parametrize("name", ("insert_zero_collectives", "InsertZeroCollectives"))
def test_a_name_gives_the_full_text(name, capsys):
    assert main(["passes", name]) == 0
    page = capsys.readouterr().out
    assert "stage 3, before:  w = gather_param(shard, None, [5, 8]" in page
    for fact in ("phase ", "requires ", "provides ", "conflicts ", "reorders_collectives ", "graph "):
        assert f"\n{fact}" in page


def test_an_unknown_name_offers_the_nearest(capsys):
    assert main(["passes", "merge_gathrs"]) == 2
    assert "unknown pass 'merge_gathrs'; did you mean 'merge_gathers'?" in capsys.readouterr().err


def test_a_users_pipeline_is_listed_with_its_own_flags_and_values(module, capsys):
    (mine,) = (item for item in _json(capsys, "--pipeline", f"{module}:LIST") if item["class"] == "FoldCasts")
    assert mine["flags"] == {"reorders_collectives": False, "eats_casts": True} | {
        name: False for name in mine["flags"] if name not in ("reorders_collectives", "eats_casts")
    }
    assert mine["graph"] == "unit"
    assert {"name": "limit", "type": "int", "default": "7", "value": "9"} in mine["options"]
    assert main(["passes", "fold_casts", "--pipeline", f"{module}:LIST"]) == 0
    page = capsys.readouterr().out
    assert "limit: int = 7 (here 9)" in page
    assert "before:  a\nafter:   b" in page


@pytest.mark.parametrize("what", ("ONE", "make"))
def test_a_pass_or_a_function_will_do(module, what, capsys):
    assert "fold_casts" in [item["name"] for item in _json(capsys, "--pipeline", f"{module}:{what}")]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (":BAD", "pass shuffle requires 'folded', which no earlier pass provides"),
        (":NUMBER", "it is 3, and should be a pipeline"),
        (":NOTHING", "has no attribute 'NOTHING'"),
        ("", "it takes MODULE:OBJECT"),
        (".inner:X", "ModuleNotFoundError"),
    ],
)
def test_a_wrong_pipeline_is_one_line(module, what, message, capsys):
    assert main(["passes", "--pipeline", module + what]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
