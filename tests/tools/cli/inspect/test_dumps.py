"""Damaged, foreign and missing dumps, and names that nothing has: one line on stderr, exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

GRAPH = "joint-4-insert_zero_collectives"
COMMANDS = {
    "ls": [],
    "show": [GRAPH],
    "diff": [GRAPH, "joint-3"],
    "explain": ["mm", "--graph", GRAPH],
    "collectives": ["forward"],
    "memory": ["forward"],
    "ranks": [],
    "dot": [GRAPH],
}


@pytest.fixture
def copy(gpt_dump, tmp_path) -> Path:
    return Path(shutil.copytree(gpt_dump, tmp_path / "copy"))


def _refuses(printed, *parts: str) -> None:
    assert printed.code == 2
    assert printed.out == ""
    assert printed.err.startswith("dsgraph: ")
    assert printed.err.count("\n") == 1, "one line"
    for part in parts:
        assert part in printed.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_dump(command, call, tmp_path):
    _refuses(call(command, tmp_path / "nowhere", *COMMANDS[command]), "nowhere", "does not exist")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_dump(command, call, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    _refuses(call(command, tmp_path, *COMMANDS[command]), "holds no dump")


def test_a_file_in_place_of_a_folder(call, tmp_path):
    (tmp_path / "file").write_text("")
    _refuses(call("ls", tmp_path / "file"), "is a file")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cut_off_file(command, call, copy):
    for path in copy.rglob("*.json"):
        path.write_bytes(path.read_bytes()[:-20])
    _refuses(call(command, copy, *COMMANDS[command]), "is damaged", ".json")


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"ls"}))
def test_a_graph_whose_file_is_gone(command, call, copy):
    for path in copy.glob("*/*/*-*.json"):
        path.unlink()
    _refuses(call(command, copy, *COMMANDS[command]), "is missing", "incomplete")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_version(command, call, copy):
    for path in copy.rglob("*.json"):
        path.write_text(path.read_text().replace('"version":1', '"version":2', 1))
    _refuses(call(command, copy, *COMMANDS[command]), "version 2", "install a newer dsgraph")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda value: value.pop("steps") and value.update(steps="many"), "steps"),
        (lambda value: value.pop("world"), "world"),
        (lambda value: value.update(axes=[{"name": "shard"}]), "axes"),
        (lambda value: value.update(format="other-tool"), "other-tool"),
    ],
)
def test_a_manifest_with_wrong_values(edit, said, call, copy):
    path = copy / "rank0" / "compile1" / "compile.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    _refuses(call("ls", copy), "compile.json", said)


def test_a_graph_in_place_of_another_file(call, copy):
    place = copy / "rank0" / "compile1"
    shutil.copy(place / "compile.json", place / f"{GRAPH}.json")
    _refuses(call("show", copy, GRAPH), "dsgraph-compile", "not 'dsgraph-graph'")


def test_binary_rubbish(call, copy):
    (copy / "rank0" / "compile1" / f"{GRAPH}.json").write_bytes(bytes(range(256)))
    _refuses(call("show", copy, GRAPH), "is damaged")


def test_a_dump_of_torch(call, tmp_path):
    (tmp_path / "model__0" / "x").mkdir(parents=True)
    (tmp_path / "model__0" / "x" / "fx_graph_readable.py").write_text("")
    _refuses(call("ls", tmp_path), "trace of torch")


def test_a_folder_inside_a_dump(call, copy):
    _refuses(call("ls", copy / "rank0"), f"did you mean {copy}?")
    _refuses(call("ls", copy / "rank0" / "compile1"), f"did you mean {copy}?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jont-2", "did you mean joint-2"),
        ("nothing_like_it", "no graph 'nothing_like_it'"),
        ("rank7/forward", "no rank7/compile1; it has rank0/compile1, rank1/compile1"),
        ("compile9/forward", "no rank0/compile9"),
        ("../../etc/passwd", "is not the name of a graph"),
        ("..", "is not the name of a graph"),
        ("rank0/../forward", "is not the name of a graph"),
        ("before", "no graph"),
        ("", "is not the name of a graph"),
    ],
)
def test_names_of_graphs(text, said, call, gpt_dump):
    _refuses(call("show", gpt_dump, text), said)


def test_a_pass_of_several_phases_must_be_told_apart(call, copy):
    path = copy / "rank0" / "compile1" / "compile.json"
    path.write_text(path.read_text().replace("prefetch_forward_gathers", "same").replace("release_kept_gather", "same"))
    _refuses(call("show", copy, "same"), "matches forward-2-same, backward-1-same")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "mmm_1"), "did you mean"),
        (("explain", "mmm_1", "--graph", "joint"), "no node 'mmm_1' in joint-7"),
        (("dot", "joint", "--around", "nil"), "no node 'nil'"),
        (("dot", "joint", "--radius", "-1"), "--radius is -1"),
        (("dot", "joint", "--out", "/nowhere/x.dot"), "cannot be written"),
        (("show", "joint", "--op", "convolution"), "no node of joint-7-keep_last_gather matches the filters"),
        (("memory", "joint"), "never runs"),
        (("collectives", "joint"), "never runs"),
        (("memory", "--most", "-1"), "is not a number of lines"),
        (("memory", "--plot", "picture.bmp"), "picture.bmp"),
        (("memory", "--plot", "/nowhere/x.svg"), "does not exist"),
        (("diff", "joint"), "required: B"),
        (("lss",), "did you mean 'ls'"),
    ],
)
def test_wrong_arguments(arguments, said, call, gpt_dump):
    command, *rest = arguments
    _refuses(call(command, gpt_dump, *rest), said)
