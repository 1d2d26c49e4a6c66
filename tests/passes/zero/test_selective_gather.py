from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import CostModel, ParameterSpec, PassError, Pipeline
from dsgraph.passes.analysis.hardware import DEVICES, Link, LinkTable
from dsgraph.passes.ir.graph import find_calls, is_wait, placeholders
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.passes.zero.keep_last_gather import KeepLastGather
from dsgraph.passes.zero.selective_gather import SelectiveGather
from tests.passes.tracing import GLOO, SHARD, code, gather, run_pass, trace

# Bytes of the gathered parameters of `_joint`: `[4, 4]`, `[8, 4]` and `[5, 8]`, which is padded to 6 rows.
A, B, C = 64, 128, 192


def _joint(x, a, b, c, tangents_1):
    full_a, full_b, full_c = gather(a, (4, 4)), gather(b, (8, 4)), gather(c, (5, 8))
    z = torch.mm(torch.mm(torch.mm(x, full_a), full_b.t()), full_c.t())
    dz = tangents_1.expand_as(z)
    return z.sum(), torch.mm(torch.mm(torch.mm(dz, full_c), full_b), full_a.t())


def _lowered(axis=SHARD, function=_joint):
    shards = torch.randn(2, 4), torch.randn(4, 4), torch.randn(3, 8)
    gm = trace(function, torch.randn(2, 4), *shards, torch.tensor(1.0))
    run_pass(InsertZeroCollectives(), gm, axis)
    run_pass(ChooseCollectiveAlgorithms(), gm, axis)
    return gm


def _params(gm):
    inputs = placeholders(gm)[1:4]
    return {
        node.name: ParameterSpec(name, (0, 0), tuple(node.meta["val"].shape), torch.float32, "0", True)
        for node, name in zip(inputs, ("a", "b", "c"), strict=True)
    }


def _keep(gm, keep_bytes, axis=SHARD, **facts):
    return run_pass(SelectiveGather(), gm, axis, params=_params(gm), keep_bytes=keep_bytes, **facts)


def _saved(gm):
    """Names of the parameters that the backward does not gather again."""
    kept = [node for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert all(is_wait(node) and node.meta["dsgraph_kept"] for node in kept)
    return {tuple(node.meta["val"].shape): name for node, name in zip(_waits(gm), "abc", strict=True) if node in kept}


def _waits(gm):
    return [node for node in gm.graph.nodes if is_wait(node)]


@pytest.mark.parametrize("axis", [SHARD, GLOO], ids=["nccl", "gloo"])
@pytest.mark.parametrize(
    ("room", "kept"),
    [(A + B + C, "abc"), (A + B + C - 1, "bc"), (C, "ab"), (B, "b"), (A, "a"), (A - 1, ""), (0, "")],
)
def test_what_fits_and_takes_longest_is_kept(axis, room, kept):
    gm = _lowered(axis)
    # Of b and c, or a and b, or c alone: by latency two gathers are worth more than one as large as both.
    assert _keep(gm, room, axis).changed == len(kept)
    assert "".join(_saved(gm).values()) == kept


def test_without_latency_bytes_alone_count():
    gm = _lowered()
    costs = CostModel(DEVICES["cpu"], (SHARD,), {"0": LinkTable(Link(latency_s=0.0, bytes_per_s=1e9))})
    _keep(gm, C + A - 1, costs=costs)
    assert "".join(_saved(gm).values()) in ("c", "ab"), "192 bytes either way"


def test_nothing_is_kept_where_nothing_is_known_to_be_to_spare():
    gm = _lowered()
    assert _keep(gm, None) == _keep(gm, None, memory_limit=None)
    assert not _saved(gm)
    (note,) = _keep(gm, None, memory_limit=10**9).notes
    assert note.startswith(
        "3 parameters are gathered again: the memory that a step leaves under the limit is not known"
    )


def test_a_note_names_what_is_gathered_again_with_its_size_and_time():
    gm = _lowered()
    (note,) = _keep(gm, B).notes
    assert note.startswith("gathered again, because 128 bytes are spare: a (64 bytes, 0.0035 ms), c (192 bytes, ")
    assert not _keep(_lowered(), 10**6).notes


def test_what_is_kept_already_counts():
    gm = _lowered()
    run_pass(KeepLastGather(), gm)
    assert _keep(gm, C + B).changed == 1
    assert "".join(_saved(gm).values()) == "bc"


def test_a_users_own_gather_is_left_alone():
    def function(x, a, b, c, tangents_1):
        mine = torch.ops._c10d_functional.all_gather_into_tensor(x * 2, 2, "0")
        return torch.ops._c10d_functional.wait_tensor(mine).sum() * tangents_1, *_joint(x, a, b, c, tangents_1)

    gm = _lowered(function=function)
    own = find_calls(gm, torch.ops._c10d_functional.all_gather_into_tensor.default)[0]
    own.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # as inside a checkpoint region
    assert _keep(gm, 10**6).changed == 3


@pytest.mark.parametrize("room", [0, A, B, C, A + C, 10**6])
def test_a_second_run_and_the_graph_itself_change_nothing(room):
    gm = _lowered()
    before = code(gm)
    _keep(gm, room)
    saved = _saved(gm)
    assert _keep(gm, room).changed == 0
    assert code(gm) == before and _saved(gm) == saved


def test_contract():
    with pytest.raises(PassError, match="selective_gather requires 'zero-collectives'"):
        Pipeline([SelectiveGather()])
