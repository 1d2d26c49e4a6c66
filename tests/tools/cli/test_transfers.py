"""`dsgraph collectives` of graphs that move tensors between memory and the disk."""

from __future__ import annotations

import torch
from torch import nn

import dsgraph
from dsgraph.tools.cli.inspect.timeline import critical_path, simulate
from dsgraph.tools.dumping.records import CollectiveRecord, GraphRecord, NodeRecord, TransferRecord

WIDTH = 64


def _node(name: str, seconds: float, *inputs: str, moves: str = "", target: str = "") -> NodeRecord:
    """A node that computes for so long, sends over the network ("net") or moves bytes to a tier."""
    collective = CollectiveRecord(kind="all_gather", group="0", seconds=seconds) if moves == "net" else None
    on_tier = moves not in ("", "net")
    transfer = TransferRecord(kind="reload", tier=moves, bytes=8, seconds=seconds) if on_tier else None
    own = 0.0 if moves else seconds
    return NodeRecord(
        *(name, "call_function", target or name), inputs=inputs, seconds=own, collective=collective, transfer=transfer
    )


def test_a_link_waits_for_no_other():
    nodes = (
        _node("send", 5.0, moves="net"),
        _node("read", 4.0, moves="disk"),
        _node("read_more", 2.0, moves="disk"),
        _node("work", 1.0),
        _node("read_is_there", 0.0, "read", target="dsgraph.wait_transfer.default"),
        _node("more_is_there", 0.0, "read_more", target="dsgraph.take_parameter.default"),
        _node("sent", 0.0, "send", target="c10d.wait_tensor.default"),
        _node("use", 1.0, "sent", "more_is_there"),
    )
    graph = GraphRecord("dsgraph-graph", 1, "g", 0, 1, "backward", 0, "", nodes)
    timeline = simulate(graph)
    assert [(move.start, move.end) for move in timeline.transfers] == [(0, 5), (0, 4), (4, 6)]
    assert [(move.exposed, move.queued) for move in timeline.moves] == [(3, 0), (2, 0)]
    assert timeline.collectives[0].exposed == 0  # it was through while the disk was waited for
    assert timeline.seconds == 7
    assert [node.name for node in critical_path(graph)] == ["read", "read_more", "use"]


def test_parameters_gradients_and_activations_on_disk_are_listed_and_drawn(one_rank, call, tmp_path):
    torch.compiler.reset()
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())))
    offload = {"parameters": "disk", "folder": str(tmp_path / "disk")}
    dsgraph.partition(model, stage=3, keep_whole_below=12, offload=offload)
    options = {"codegen": "eager", "activation_offload": "disk", "dump": str(tmp_path / "dump")}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    compiled(torch.randn(4096, WIDTH)).sum().backward()

    forward, backward = call("collectives", tmp_path / "dump", "--json").json
    weights = [name for name, _ in model.named_parameters()]
    assert [row["why"] for row in forward["transfers"] if row["kind"] == "fetch_parameter"] == weights
    stored = [row for row in backward["transfers"] if row["kind"] == "store_gradient"]
    assert [row["why"] for row in stored] == weights[::-1]
    left = [row["bytes"] for row in forward["transfers"] if row["kind"] == "offload"]
    came_back = [row["bytes"] for row in backward["transfers"] if row["kind"] == "reload"]
    assert sorted(left) == sorted(came_back)
    assert left
    rows = [*forward["transfers"], *backward["transfers"]]
    assert {row["tier"] for row in rows} == {"disk"}
    assert all(row["seconds"] > 0 for row in rows)
    assert {row["bytes"] for row in rows if row["kind"] != "offload" and row["kind"] != "reload"} == {4 * WIDTH**2}

    printed = call("collectives", tmp_path / "dump", "--trace", tmp_path / "trace.json").out
    assert f"{len(forward['transfers'])} transfers" in printed
    assert (tmp_path / "trace.json").read_text().count('"to and from disk"') == 2
