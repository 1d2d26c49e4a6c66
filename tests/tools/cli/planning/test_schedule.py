from __future__ import annotations

import json

import pytest


def _called(call, *arguments):
    return call("schedule", "--stages", 4, "--microbatches", 8, *arguments)


def test_a_line_shows_what_a_rank_does_when(call):
    shown = _called(call, "--kind", "gpipe").out.splitlines()
    assert shown[0] == "GPipe: 4 stages on 4 ranks, 8 micro-batches"
    assert shown[-1] == "bubble: 27.3% of the ranks' time, predicted; 33 times a stage's forward"
    assert shown[-3].split() == ["3", "3", "...FFFFFFFFBBBBBBBBBBBBBBBB......"]


def test_torchs_schedules_of_several_stages_a_rank(call):
    found = _called(call, "--kind", "zbv", "--json").json
    assert found["kind"] == "ZBVZeroBubble"
    assert found["stages_of_ranks"] == [[0, 3], [1, 2]]
    # 8 micro-batches through 4 stages: a forward and the two halves of a backward each
    assert len(found["slots"]) == 3 * 4 * 8
    assert found["bubble"] < _called(call, "--kind", "Interleaved1F1B", "--json").json["bubble"]


def test_a_trace(call, tmp_path):
    file = tmp_path / "trace.json"
    assert _called(call, "--kind", "gpipe", "--trace", file).code == 0
    events = json.loads(file.read_text())["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == [f"rank {rank}" for rank in range(4)]
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == 3]
    assert [event["dur"] for event in spans] == [1e6] * 8 + [2e6] * 8
    assert spans[0] == {"ph": "X", "name": "forward: 3F0", "ts": 3e6, "dur": 1e6, "pid": 0, "tid": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "interleaved"], "--kind is 'interleaved'; it takes one of GPipe, 1F1B"),
        (["--kind", "zbv", "--ranks", 4], "ZBVZeroBubble on 4 ranks takes 8 stages, not 4"),
        (["--microbatches", 3], "--microbatches is 3; it takes at least as many as --stages, 4"),
        (["--trace", "/nowhere/x.json"], "--trace: /nowhere/x.json cannot be written"),
    ],
)
def test_what_does_not_fit_is_refused(call, arguments, message):
    refused = _called(call, *arguments)
    assert refused.code == 2
    assert message in refused.err
