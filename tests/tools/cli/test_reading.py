"""Output of the commands that read a dump."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.distributed as dist

import dsgraph
from dsgraph.passes.ir.graph import emit, find_calls
from dsgraph.passes.memory.fit import PLANNED
from dsgraph.tools.cli.inspect.compare_graphs import compare
from dsgraph.tools.cli.inspect.dumps import Dump
from dsgraph.tools.cli.inspect.memory import PLANNED as SHOWN
from dsgraph.tools.cli.inspect.timeline import critical_path, simulate
from dsgraph.tools.dumping.records import CollectiveRecord, GraphRecord, NodeRecord
from examples.gpt import GPT, GPTConfig
from tests.models import build
from tests.tools.dumping.dumps import dump

pytestmark = pytest.mark.slow


def test_reading_needs_no_torch(gpt_dump):
    program = (
        "import sys; from dsgraph.tools.cli.main import main; code = main(['ls', sys.argv[1]]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(gpt_dump)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ls(call, gpt_dump):
    printed = call("ls", gpt_dump)
    assert printed.code == 0
    assert "rank 0 of 2, compile 1" in printed.out
    assert re.search(r"joint-4-insert_zero_collectives +\d+ +\d+ +\d+ +[\d.]+ kB", printed.out)
    assert re.search(r"forward-2-prefetch_forward_gathers .* [\d.]+ kB +[\d.]+ kB", printed.out)
    assert "ranks 1 as well" in printed.out
    data = call("ls", gpt_dump, "--json", "--rank", "1").json
    assert data["compiles"][0]["rank"] == 1
    assert data["compiles"][0]["steps"][-1]["pass_name"] == "delay_reduction_waits"


def test_bytes_on_the_wire_are_those_of_the_parameters(call, gpt_dump):
    """Stage 3 sends (n-1)/n of each sharded parameter a gather and a reduction, twice that for what is all-reduced."""
    steps = {step["graph"]: step for step in call("ls", gpt_dump, "--json").json["compiles"][0]["steps"]}
    sizes = {name: 4 * param.numel() for name, param in build("gpt").named_parameters()}
    whole = sum(size for name, size in sizes.items() if "norm" in name)
    sharded = sum(sizes.values()) - whole
    assert steps["forward-2-prefetch_forward_gathers"]["sent"] == sharded // 2
    not_again = sizes["head.weight"] + sizes["embedding.weight"]  # kept; not read by the backward
    assert steps["backward-5-delay_reduction_waits"]["sent"] == (2 * sharded - not_again) // 2 + whole


def test_show(call, gpt_dump):
    printed = call("show", gpt_dump, "joint-4")
    assert printed.out.startswith("# joint graph after pass 4, insert_zero_collectives")
    assert "return [" in printed.out
    assert "\033[" not in printed.out, "no colours in a pipe"
    assert "\033[" in call("show", gpt_dump, "joint-4", "--colour", "always").out
    one = call(
        "show", gpt_dump, "joint", "--op", "all_gather", "--module", "blocks.0", "--pass", "insert_zero_collectives"
    )
    lines = [line for line in one.out.splitlines() if " = torch" in line]
    assert len(lines) == 4, "qkv, out, up, down"
    assert all("all_gather_into_tensor" in line for line in lines)
    assert "4 of " in one.out
    same = call("show", gpt_dump, "choose_collective_algorithms")
    assert "the pass changed nothing; this is joint-4-insert_zero_collectives" in same.out
    data = call("show", gpt_dump, "rank1/joint-4", "--json").json
    assert data["graph"] == "rank1/compile1/joint-4-insert_zero_collectives"


def test_diff_of_two_passes(call, gpt_dump, apart_dump):
    printed = call("diff", gpt_dump, "joint-3", "joint-4")
    assert printed.code == 1
    assert re.search(r"-- \d+ dsgraph\.gather_param\.default, \d+ dsgraph\.reduce_grad\.default", printed.out)
    assert "++ " in printed.out and "_c10d_functional.wait_tensor.default" in printed.out
    moved = call("diff", apart_dump, "forward-0", "forward-1", "--json").json
    assert (moved["removed"], moved["added"], moved["changed"]) == ([], [], [])
    assert {node["target"].split(".")[1] for node in moved["moved"]} <= {"all_gather_into_tensor", "view"}
    fused = call("diff", gpt_dump, "forward-0", "forward-1", "--json").json
    assert {node["target"].split(".")[1] for node in fused["removed"]} == {"all_gather_into_tensor"}
    assert {node["target"].split(".")[1] for node in fused["added"]} == {"all_gather_into_tensor_coalesced", "getitem"}


def test_diff_of_two_ranks_and_two_runs(call, gpt_dump, tmp_path):
    assert call("diff", gpt_dump, "rank0/joint", "rank1/joint").code == 0
    dump(tmp_path)
    printed = call("diff", gpt_dump, "joint", "joint", "--with", tmp_path)
    assert printed.code == 0
    assert "0 nodes removed, 0 added, 0 changed, 0 moved" in printed.out
    assert printed.out.startswith(f"{gpt_dump}/rank0")


def _nodes(*lines: str) -> list[NodeRecord]:
    """`c = add(a, b)` -> a node; `a` alone is an input."""
    found = []
    for line in lines:
        name, _, call = line.partition(" = ")
        if not call:
            found.append(NodeRecord(name=name, op="placeholder", target=name))
            continue
        target, _, args = call.rstrip(")").partition("(")
        marked = re.sub(r"\b([a-z]\w*)", r"%\1", args)
        inputs = tuple(dict.fromkeys(re.findall(r"%(\w+)", marked)))
        op = "output" if target == "return" else "call_function"
        found.append(NodeRecord(name=name, op=op, target=target, args=marked, inputs=inputs))
    return found


def test_new_names_are_no_change():
    first = _nodes("a", "b", "c = add(a, b)", "d = mul(c, 2)", "o = return(d)")
    second = _nodes("x1", "x2", "y1 = add(x1, x2)", "y2 = mul(y1, 2)", "o = return(y2)")
    assert compare(first, second).is_empty


def test_renumbered_nodes_behind_a_removed_one_are_the_same():
    first = _nodes("a", "mm = mm(a, a)", "mm_1 = mm(mm, a)", "s = sin(mm_1)", "mm_2 = mm(s, a)", "o = return(mm_2)")
    second = _nodes("a", "mm = mm(a, a)", "s = sin(mm)", "mm_1 = mm(s, a)", "o = return(mm_1)")
    difference = compare(first, second)
    assert [node.name for node in difference.removed] == ["mm_1"]
    assert difference.added == ()
    assert [(change.before.name, change.after.name) for change in difference.changed] == [("s", "s")]


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (("a", "b", "c = add(b, a)", "o = return(c)"), ("arguments",)),
        (("a", "b", "c = sub(a, b)", "o = return(c)"), None),
        (("a", "b", "c = add(a, b)", "o = return(c, c)"), ("arguments",)),
    ],
)
def test_changed_calls_are_found(second, what):
    difference = compare(_nodes("a", "b", "c = add(a, b)", "o = return(c)"), _nodes(*second))
    assert not difference.is_empty
    if what is not None:
        assert [change.what for change in difference.changed] == [what]
    else:
        assert [node.target for node in (*difference.removed, *difference.added)] == ["add", "sub"]


def test_the_fewest_moves_explain_an_order():
    first = _nodes("a", "p = sin(a)", "q = cos(a)", "r = tan(a)", "o = return(p, q, r)")
    second = _nodes("a", "r = tan(a)", "p = sin(a)", "q = cos(a)", "o = return(p, q, r)")
    difference = compare(first, second)
    assert [node.name for node in difference.moved] == ["r"]
    assert not difference.changed


def test_explain(call, gpt_dump, apart_dump):
    name = call("collectives", apart_dump, "forward", "--json").json[0]["collectives"][1]["node"]
    printed = call("explain", apart_dump, f"%{name}", "--graph", "forward")
    assert "made by insert_zero_collectives (joint)" in printed.out
    assert "moved by prefetch_forward_gathers (forward)" in printed.out
    assert "for blocks.0.attention.qkv.weight" in printed.out
    assert re.search(r"examples/gpt\.py:\d+: q, k, v = self\.qkv\(x\)", printed.out)
    assert re.search(r"[\d.]+ kB \(communication\), alive from \w+ to \w+", printed.out)
    assert "used by wait_tensor" in printed.out
    data = call("explain", apart_dump, name, "--graph", "forward", "--json").json
    assert data["memory"][0]["kind"] == "communication"
    assert call("explain", gpt_dump, "primals_2", "--graph", "joint").out.count("parameter embedding.weight") >= 1


def test_a_bucket_names_its_parameters(call, gpt_dump, apart_dump):
    (bucket,), backward = (graph["collectives"] for graph in call("collectives", gpt_dump, "--json").json)
    apart = call("collectives", apart_dump, "--json").json
    assert bucket["parameters"] == [row["why"] for row in apart[0]["collectives"]], "in the order of use"
    for rows, alone in (([bucket], apart[0]), (backward, apart[1])):
        assert len(rows) < len(alone["collectives"])
        assert sum(row["sent"] for row in rows) == sum(row["sent"] for row in alone["collectives"])
        assert sum(row["seconds"] for row in rows) < sum(row["seconds"] for row in alone["collectives"])
    printed = call("explain", gpt_dump, bucket["node"], "--graph", "forward").out
    assert "made by bucket_forward_gathers (forward)" in printed
    assert "for embedding.weight, blocks.0.attention.qkv.weight, blocks.0.attention.out.weight and" in printed


def test_collectives(call, apart_dump):
    printed = call("collectives", apart_dump)
    assert printed.out.count("critical path:") == 2
    for why in ("blocks.0.attention.qkv.weight", "head.weight", "norm"):
        assert why in printed.out
    forward, backward = call("collectives", apart_dump, "--json").json
    assert len(forward["collectives"]) == len([name for name, p in build("gpt").named_parameters() if p.dim() > 1])
    assert all(row["sent"] > 0 and row["seconds"] > 0 and row["ranks"] == 2 for row in forward["collectives"])
    assert any(row["overlaps_with"] for row in forward["collectives"])
    assert backward["critical_path"]


def _timed(name: str, seconds: float, *inputs: str, sends: bool = False, waits: bool = False) -> NodeRecord:
    target = "c10d.wait_tensor.default" if waits else name
    collective = CollectiveRecord(kind="all_gather", group="0", seconds=seconds) if sends else None
    own = 0.0 if sends else seconds
    return NodeRecord(name, "call_function", target, inputs=inputs, seconds=own, collective=collective)


def test_a_transfer_hides_behind_what_computes_meanwhile():
    nodes = (
        _timed("send", 5.0, sends=True),
        _timed("work", 3.0),
        _timed("wait", 0.0, "send", waits=True),
        _timed("use", 1.0, "wait"),
    )
    graph = GraphRecord("dsgraph-graph", 1, "g", 0, 1, "forward", 0, "", nodes)
    timeline = simulate(graph)
    (transfer,) = timeline.transfers
    assert timeline.seconds == 6.0
    assert transfer.exposed == timeline.exposed == 2.0
    assert [node.name for node in transfer.behind] == ["work"]
    assert [node.name for node in critical_path(graph)] == ["send", "use"]


def test_a_collective_delays_what_computes_beside_it():
    sends = CollectiveRecord(kind="all_gather", group="0", seconds=5.0, delay=2.0)
    send = NodeRecord("send", "call_function", "send", collective=sends)
    work, wait = _timed("work", 4.0), _timed("wait", 0.0, "send", waits=True)
    found = []
    for nodes in ((send, work, wait), (send, wait, work)):  # a wait delays nothing
        timeline = simulate(GraphRecord("dsgraph-graph", 1, "g", 0, 1, "forward", 0, "", nodes))
        found.append((timeline.seconds, timeline.exposed))
    assert found == [(6.0, 0.0), (9.0, 5.0)]


def test_time_in_the_queue_is_told_from_time_under_way():
    nodes = (
        _timed("first", 5.0, sends=True),
        _timed("second", 2.0, sends=True),
        _timed("work", 3.0),
        _timed("wait_second", 0.0, "second", waits=True),
        _timed("wait_first", 0.0, "first", waits=True),
    )
    timeline = simulate(GraphRecord("dsgraph-graph", 1, "g", 0, 1, "forward", 0, "", nodes))
    first, second = timeline.transfers
    assert (second.exposed, second.queued) == (4.0, 2.0)
    assert (first.exposed, first.queued) == (0.0, 0.0)
    assert timeline.seconds == 7.0 == 3.0 + timeline.exposed


def test_a_trace_has_lanes_and_waits_of_each_graph(call, gpt_dump, tmp_path):
    path = tmp_path / "trace.json"
    assert call("collectives", gpt_dump, "--trace", path).code == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    graphs = call("collectives", gpt_dump, "--json").json
    assert names == [graph["graph"] for graph in graphs]
    for number, graph in enumerate(graphs):
        lanes = {
            event["args"]["name"]: event["tid"]
            for event in events
            if event["name"] == "thread_name" and event["pid"] == number
        }
        assert set(lanes) == {"compute", "compute waits", "shard (2)"}
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == number]
        longest = max(graph["collectives"], key=lambda row: row["exposed"])
        waits = [event for event in spans if event["tid"] == lanes["compute waits"]]
        found = max(waits, key=lambda event: event["dur"])
        assert found["name"] == f"for {longest['why']}"
        assert found["dur"] == pytest.approx(1e6 * longest["exposed"])
        assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * graph["seconds"])
    assert "cannot be written" in call("collectives", gpt_dump, "--trace", "/nowhere/x.json").err


def test_memory(call, gpt_dump):
    printed = call("memory", gpt_dump, "backward")
    assert re.search(r"peak [\d.]+ kB at \w+", printed.out)
    assert "parameters" in printed.out
    assert re.search(r"examples/gpt\.py:\d+", printed.out)
    (data,) = call("memory", gpt_dump, "backward", "--json").json
    assert data["peak"] == max(data["live"]) == sum(item["bytes"] for item in data["alive"])
    assert sum(item["bytes"] for item in data["by_origin"]) == data["peak"]


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_pictures(suffix, start, call, gpt_dump, tmp_path):
    path = tmp_path / f"picture{suffix}"
    assert call("memory", gpt_dump, "--plot", path).code == 0
    content = path.read_bytes()
    assert content.startswith(start)
    assert len(content) > 5_000


def test_ranks_that_agree(call, gpt_dump):
    printed = call("ranks", gpt_dump)
    assert printed.code == 0
    assert "ranks 0, 1 run the same" in printed.out


def test_ranks_reads_a_graph_only_where_files_differ(call, gpt_dump, tmp_path, monkeypatch):
    shutil.copytree(gpt_dump, tmp_path / "copy")
    read = []
    original = Dump.read
    monkeypatch.setattr(Dump, "read", lambda self, name: read.append(str(name)) or original(self, name))
    assert call("ranks", tmp_path / "copy").code == 0
    assert not read
    path = next((tmp_path / "copy" / "rank1" / "compile1").glob("backward-0-before.json"))
    path.write_text(path.read_text().replace('"target":"aten.mm.default"', '"target":"aten.sub.Tensor"'))
    printed = call("ranks", tmp_path / "copy")
    assert printed.code == 1 and "aten.sub.Tensor" in printed.out
    assert read == [f"rank{rank}/compile1/backward-0-before" for rank in (0, 1)]


@pytest.mark.slow
def test_uneven_rows_are_no_difference(call, tmp_path):
    for rank in range(3):
        dump(tmp_path, lambda: build("small"), rank=rank, world=3)
    printed = call("ranks", tmp_path)
    assert printed.code == 0
    assert re.search(r"\d+ nodes differ only in sizes", printed.out)


def test_the_first_difference_of_ranks_is_named(call, tmp_path):
    pipeline = dsgraph.default_pipeline()
    dump(tmp_path, lambda: build("small"), rank=0)
    dump(tmp_path, lambda: build("small"), rank=1, pipeline=pipeline.without("bucket_small_reductions"))
    printed = call("ranks", tmp_path)
    assert printed.code == 1
    assert "rank 1 differs from rank 0, first in compile 1: the passes" in printed.out
    assert "joint-2-bucket_small_reductions" in printed.out


@pytest.mark.slow
def test_a_pass_that_parts_ranks_is_named(call, tmp_path):
    @dsgraph.graph_pass(phase="forward")
    def add_nothing_on_rank_one(gm, ctx):
        if dist.get_rank() == 0:
            return 0
        sine = find_calls(gm, torch.ops.aten.sin.default)[0]
        last = emit(sine.next, torch.ops.aten.add.Tensor, sine, 0)
        sine.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last)
        return 1

    for rank in range(2):
        dump(tmp_path, rank=rank, pipeline=dsgraph.default_pipeline() + add_nothing_on_rank_one)
    printed = call("ranks", tmp_path)
    assert printed.code == 1
    assert "after pass add_nothing_on_rank_one" in printed.out


def test_one_rank_alone_has_nothing_to_compare(call, tmp_path):
    dump(tmp_path, lambda: build("small"))
    printed = call("ranks", tmp_path)
    assert printed.code == 2
    assert "has only rank 0" in printed.err


def test_dot(call, gpt_dump, tmp_path):
    text = call("dot", gpt_dump, "forward").out
    assert text.startswith('digraph "forward-2-prefetch_forward_gathers" {')
    graph = Dump(gpt_dump).graph("forward")
    assert text.count("fillcolor") == len(graph.nodes)
    near = call("dot", gpt_dump, "forward", "--around", "mm", "--radius", "1").out
    assert 3 <= near.count("fillcolor") < 10
    path = tmp_path / "graph.graphml"
    call("dot", gpt_dump, "forward", "--format", "graphml", "--out", path)
    network = nx.read_graphml(path)
    assert network.number_of_nodes() == len(graph.nodes)
    assert network.nodes["mm"]["target"] == "aten.mm.default"


def test_paths_may_have_spaces_and_letters_of_any_kind(call, tmp_path):
    folder = Path(tmp_path) / "größe und Form"
    dump(folder, lambda: build("small"))
    assert call("ls", folder).code == 0


def test_small_graphs_have_a_curve_of_their_own(call, tmp_path):
    torch._dynamo.reset()
    backend = dsgraph.api.new_backend()
    options = {"codegen": "eager", "dump": tmp_path}
    torch.compile(torch.nn.Linear(3, 300), backend=backend, options=options)(torch.randn(2, 3))
    lines = [line for line in call("memory", tmp_path, "forward").out.splitlines() if "#" in line]
    (data,) = call("memory", tmp_path, "forward", "--json").json
    assert len(lines) == len(data["live"]) < 16
    assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))


def test_every_wait_of_a_coalesced_collective_counts():
    sends = NodeRecord(
        "send",
        "call_function",
        "c10d.all_gather_coalesced",
        collective=CollectiveRecord("all_gather", "0", seconds=4.0),
    )
    item = NodeRecord("item", "call_function", "operator.getitem", args="%send, 0", inputs=("send",))
    wait = NodeRecord("wait", "call_function", "c10d.wait_tensor.default", inputs=("item",))
    timeline = simulate(GraphRecord("dsgraph-graph", 1, "g", 0, 1, "forward", 0, "", (sends, item, wait)))
    assert timeline.exposed == timeline.seconds == 4.0


def test_a_refused_graph_is_dumped(call, tmp_path):
    @dsgraph.graph_pass(phase="joint")
    def drop_a_wait(gm, ctx):
        wait = find_calls(gm, torch.ops._c10d_functional.wait_tensor.default)[0]
        wait.replace_all_uses_with(wait.args[0])
        gm.graph.erase_node(wait)
        return 1

    with pytest.raises(Exception, match="drop_a_wait"):
        dump(tmp_path, pipeline=dsgraph.default_pipeline() + drop_a_wait)
    step = call("ls", tmp_path, "--json").json["compiles"][0]["steps"][-1]
    assert step["pass_name"] == "drop_a_wait"
    assert step["notes"][0].startswith("refused: ")
    assert "drop_a_wait refused: " in call("ls", tmp_path).out
    assert call("show", tmp_path, "drop_a_wait").code == 0


def test_memory_shows_what_a_limit_has_chosen(call, tmp_path):
    shape = GPTConfig(vocab=64, width=32, heads=2, layers=3)
    batch = torch.zeros(4, 64, dtype=torch.long), torch.zeros(4, 64, dtype=torch.long)
    dump(tmp_path, lambda: GPT(shape), batch, world=1, stage=0, memory_limit="2.4MB")
    shown = call("memory", tmp_path).out
    assert "under memory_limit\na step takes " in shown and " of 2,400,000; recomputation takes " in shown
    assert "blocks.1: saves " in shown or "blocks.0, blocks.1" in shown
    assert PLANNED in call("ls", tmp_path).out and SHOWN == PLANNED
