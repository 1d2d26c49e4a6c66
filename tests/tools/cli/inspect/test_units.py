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


def test_the_list_says_which_blocks_run_a_graph_and_what_the_step_gathers(blocks_dump, call):
    blocks, norm, *_ = call("ls", blocks_dump).out.split("\n\n")
    assert "(Block.forward), run 3 times in a step: by blocks.0 ... blocks.2 (3)\n" in blocks
    # The step gathers four weights and reduces the gradients of two norms besides.
    assert "\nno shards, 6 parameters (6 gathered by the graph of the step), codegen eager" in blocks
    assert "run " not in norm and "\nno shards, 1 parameters (1 gathered by the graph of the step)" in norm
    units = call("ls", blocks_dump, "--json").json["units"]
    assert units[0]["modules"] == ["blocks.0", "blocks.1", "blocks.2"] and units[0]["graphs"] == [[1]]


def test_the_graph_of_the_step_names_its_units(blocks_dump, call):
    runs = [
        node for node in read(blocks_dump / "rank0" / "compile4", "forward-0-before").nodes if "run_f" in node.target
    ]
    assert [node.module for node in runs[1:4]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert "# blocks." in call("show", blocks_dump, "compile4/forward", "--module", "blocks.*").out
    assert "blocks." in call("collectives", blocks_dump, "compile4/backward").out


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
    assert [item["runs"] for item in graphs[:2]] == [3, 3] and [item["runs"] for item in of_step] == [1, 1]
    count = sum(item["runs"] * len(item["collectives"]) for item in graphs)
    assert f"all graphs of a step: {count} collectives" in printed
    gathered = {name for item in of_step for one in item["collectives"] for name in one["parameters"]}
    assert "blocks.1.attention.qkv.weight" in gathered
    seconds = sum(item["seconds"] for item in of_step)
    assert f"predicted {1000 * seconds:.3g} ms" in printed
    assert "run 3 times in a step" in call("memory", blocks_dump).out


def test_a_graph_that_runs_once_has_no_remark(gpt_dump, call):
    assert "times in a step" not in call("ls", gpt_dump).out
