from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import PassError, Pipeline
from dsgraph.passes.zero.compress_reductions import CompressReductions
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import GLOO, SHARD, code, run_pass, trace

_SIZES = (11, 3, 20)
_EACH = 5  # inputs of a gradient: itself and what is kept


def _reduce(grad, kept, group="0"):
    momentum, worker_error, owner_error, coefficients = kept
    own, _, *errors = torch.ops.dsgraph.reduce_compressed(
        grad, momentum.shape, momentum, worker_error, owner_error, coefficients, group=group, splits_rows=False
    )
    return own, *errors


def _inputs(rank, *sizes, ranks=2):
    """Return for each gradient: itself, the momentum (equal on all ranks), errors of rank and owner, coefficients."""
    found = []
    for size in sizes:
        chunks = torch.zeros(size).chunk(ranks)
        own = len(chunks[rank]) if rank < len(chunks) else 0
        found += [torch.randn(size), torch.full((size,), 0.5), torch.randn(size), torch.randn(own)]
        found.append(torch.tensor([0.9, 0.1]))
    return found


def _one(grad, *kept):
    return _reduce(grad, kept)


def _three(*given):
    found = []
    for start in range(0, len(given), _EACH):
        grad, *kept = given[start : start + _EACH]
        found += _reduce(grad * 2, kept)
    return tuple(found)


def _both_ranks(function, inputs, graph_pass, *, changed):
    graphs = [trace(function, *given) for given in inputs]
    for gm in graphs:
        assert run_pass(graph_pass, gm, GLOO).changed == changed
    return graphs, lockstep.run(graphs, inputs)


def _assert_equal(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def test_signs_travel_to_owners_and_back():
    gm = trace(_one, *_inputs(0, 11))
    assert run_pass(CompressReductions(), gm, GLOO).changed == 1
    FileCheck().check("compress_momentum.default(").check_same(", 2)").check("exchange_by_messages").check(
        "wait_tensor"
    ).check("compress_average.default(").check_same(", 6)").check("gather_by_messages").check("wait_tensor").check(
        "unpack_signs.default("
    ).run(code(gm))
    assert "reduce_compressed" not in code(gm)


def test_other_backends_have_collectives_of_their_own():
    gm = trace(_one, *_inputs(0, 11))
    run_pass(CompressReductions(), gm, SHARD)
    FileCheck().check("all_to_all_single").check("all_gather_into_tensor").run(code(gm))


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(2**20, 1), (60, 2), (1, 3)])
def test_buckets_change_no_number(bucket_bytes, buckets):
    torch.manual_seed(0)
    inputs = [_inputs(0, *_SIZES), _inputs(1, *_SIZES)]
    _, wanted = _both_ranks(_three, inputs, CompressReductions(bucket_bytes=1), changed=3)
    (first, _), found = _both_ranks(_three, inputs, CompressReductions(bucket_bytes=bucket_bytes), changed=3)
    for kind in ("exchange_by_messages", "gather_by_messages"):
        assert code(first).count(f"{kind}.default(") == buckets
    _assert_equal(found, wanted)


def test_nothing_is_lost():
    """The sum of sent values and errors of all ranks is the original sum."""
    torch.manual_seed(0)
    inputs = [_inputs(0, 11), _inputs(1, 11)]
    _, ((momentum, error, owned), (other, other_error, other_owned)) = _both_ranks(
        _one, inputs, CompressReductions(), changed=1
    )
    assert torch.equal(momentum, other)
    was = [0.9 * m + 0.1 * grad + own for grad, m, own, _, _ in inputs]
    sent = (was[0] - error + was[1] - other_error) / 2
    owners = torch.cat([given[3] for given in inputs])
    torch.testing.assert_close(momentum + torch.cat([owned, other_owned]), sent + owners)


def test_buckets_overlap():
    """The gather of a bucket starts after the next one's exchange, and is waited for at the end."""
    gm = trace(_three, *_inputs(0, *_SIZES))
    run_pass(CompressReductions(bucket_bytes=60), gm, GLOO)
    FileCheck().check("exchange_by_messages").check("exchange_by_messages").check("gather_by_messages").check(
        "gather_by_messages"
    ).run(code(gm))


def test_gradients_of_one_momentum_are_added_first():
    def apart(other, grad, *kept):
        return tuple(a + b for a, b in zip(_reduce(grad, kept), _reduce(other, kept), strict=True))

    torch.manual_seed(0)
    inputs = [[torch.randn(11), *_inputs(rank, 11)] for rank in range(2)]
    _, found = _both_ranks(apart, inputs, CompressReductions(), changed=1)
    added = [[other + grad, *kept] for other, grad, *kept in inputs]
    _, wanted = _both_ranks(_one, added, CompressReductions(), changed=1)
    _assert_equal(found, wanted)


def test_on_one_rank_nothing_travels():
    gm = trace(lambda grad, *kept: _reduce(grad, kept, group=""), *_inputs(0, 11, ranks=1))
    run_pass(CompressReductions(), gm)
    assert "wait_tensor" not in code(gm) and code(gm).count("unpack_signs.default(") == 1


def test_it_must_run_before_the_lowering():
    with pytest.raises(PassError, match="compress_reductions must run before insert_zero_collectives"):
        Pipeline([InsertZeroCollectives(), CompressReductions()])
