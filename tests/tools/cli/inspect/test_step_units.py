"""A dump of a model with repeated blocks: each graph once, with the number of its runs and names in the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gpt import GPT, GPTConfig
from tests.tools.dumping.dumps import dump, manifest, read


@pytest.fixture(scope="module")
def blocks_dump(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    dump(folder, lambda: GPT(GPTConfig(vocab=32, width=32, heads=2, layers=3)))
    return folder


def test_the_list_begins_with_the_sequence_of_units(blocks_dump, call):
    printed = call("ls", blocks_dump)
    first, _, _, *rows = printed.out.partition("\n\n")[0].splitlines()
    assert first.startswith("a training step runs 5 units")
    # The step gathers four weights and reduces the gradients of two norms besides.
    assert rows[0].split() == ["blocks.0", "...", "blocks.2", "(3)", "3", "1", "6", "0"]
    assert rows[1].split() == ["norm", "1", "2", "1", "0"]
    units = call("ls", blocks_dump, "--json").json["units"]
    assert units[0]["modules"] == ["blocks.0", "blocks.1", "blocks.2"] and units[0]["graphs"] == [[1]]


def test_graphs_of_blocks_have_the_names_of_the_model(blocks_dump):
    place = blocks_dump / "rank0" / "compile1"
    record = manifest(place)
    assert (record.module, record.block, record.in_step) == ("blocks.0", "blocks.0", True)
    names = {item.name for item in record.parameters if item.is_planned}
    assert "blocks.*.attention.qkv.weight" in names and len(names) == 6
    inputs = {node.parameter for node in read(place, "forward-0-before").nodes if node.op == "placeholder"}
    assert inputs == {*names, ""}
    assert set(read(place, "backward-0-before").nodes[-1].gradients.values()) == names
    assert {item.name for item in manifest(blocks_dump / "rank0" / "compile2").parameters} == {"norm.weight"}


def test_the_costs_of_a_step_count_each_run(blocks_dump, call):
    printed = call("collectives", blocks_dump).out
    assert "compile1/forward-0-before, run 3 times in a step: by blocks.0 ... blocks.2 (3): no coll" in printed
    graphs = call("collectives", blocks_dump, "--json").json
    of_step = [item for item in graphs if "/compile4/" in item["graph"]]
    assert [item["runs"] for item in graphs[:2]] == [3, 3] and len(of_step) == 2
    gathered = {name for item in of_step for one in item["collectives"] for name in one["parameters"]}
    assert "blocks.1.attention.qkv.weight" in gathered
    seconds = sum(item["seconds"] for item in of_step)
    assert f"predicted {1000 * seconds:.3g} ms" in printed
    assert "run 3 times in a step" in call("memory", blocks_dump).out


def test_a_dump_of_one_graph_has_no_sequence(gpt_dump, call):
    assert "units" not in call("ls", gpt_dump).out
