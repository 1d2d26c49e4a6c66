"""The traffic of a step with several micro-batches."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsgraph
from examples.gpt import GPT
from tests.distributed.training import compare, full
from tests.models import CASES, SMALL, build, tokens
from tests.pipelines import without_buckets

pytestmark = pytest.mark.distributed

MATRICES = 2 + 4  # of the one-layer GPT: embedding, head, qkv, out, up, down
MICRO_BATCHES = 4

# ZeRO stages, with what `accumulate` is told.
REDUCING_ONCE = ((0, None), (1, None), (2, True))


LAYERS, LAYER_MATRICES = (
    "dynamic",
    3,
)  # an embedding, a layer and a head, of which keep_whole_below=40 shards the weights


def _collectives(profile) -> dict[str, int]:
    """Collectives that ran, by kind, wherever they were called from; messages that are no exchange are a gather's."""
    counts: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith("_c10d_functional::") and "wait" not in event.name:
            counts[event.name.split("::")[1].removesuffix("_out")] += 1
        elif event.name == "c10d::send":
            counts["message"] += 1
        elif event.name == "dsgraph::exchange_by_messages":
            counts["exchange"] += 1
    messages, others = counts.pop("message", 0), dist.get_world_size() - 1
    assert messages % others == 0
    counts["all_gather_into_tensor"] += messages // others - counts["exchange"]
    return dict(counts)


def _count(stage: int, codegen: str | None, reduce_once: bool | None) -> dict[str, int]:
    """Collectives of the second step of four micro-batches."""
    rank = dist.get_rank()
    model = dsgraph.partition(build(LAYERS), stage=stage, keep_whole_below=40)
    options = {"codegen": codegen, "pipeline": without_buckets()}
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for micro in range(MICRO_BATCHES):
                is_last = micro == MICRO_BATCHES - 1
                with nullcontext() if is_last else dsgraph.accumulate(model, reduce_once=reduce_once):
                    runs(*tokens(MICRO_BATCHES * step + micro, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _collectives(profile)


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize(("stage", "reduce_once"), [*REDUCING_ONCE, (2, None), (3, None)])
def test_collectives_of_a_step(ranks, stage, reduce_once, codegen):
    counts = ranks(2).run(_count, stage, codegen, reduce_once)[0]
    gathers = counts.get("all_gather_into_tensor", 0)
    scatters = counts.get("reduce_scatter_tensor", 0) + counts.get("exchange", 0)
    reductions = counts.get("all_reduce", 0)
    if stage == 0:
        # Local gradients are reduced once: all whole parameters in one bucket, and which of them were used.
        assert (gathers, scatters, reductions) == (0, 0, 2)
    elif stage == 1 or reduce_once:
        assert (gathers, scatters, reductions) == (LAYER_MATRICES, LAYER_MATRICES, 2)
    elif stage == 2 and codegen is None:  # messages of reductions that start together count as gathers
        assert gathers + scatters == LAYER_MATRICES * (1 + MICRO_BATCHES)
    elif stage == 2:
        assert (gathers, scatters) == (LAYER_MATRICES, LAYER_MATRICES * MICRO_BATCHES)
    elif codegen is None:
        assert gathers + scatters == LAYER_MATRICES * 2 * MICRO_BATCHES
    else:
        assert scatters == LAYER_MATRICES * MICRO_BATCHES
        # Compiled: the head stays for the backward, which does not read the embedding.
        assert gathers == (2 * LAYER_MATRICES - 2) * MICRO_BATCHES


def _gathers_with_gradients(stage: int) -> int:
    """Gathers of an uncompiled forward while there are gradients, after a write that leaves no trace."""
    rank = dist.get_rank()
    model = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=20)
    model(*tokens(0, rank)).backward()
    for param in model.parameters():
        param.data.to_local().mul_(0.5)
    expected = build("gpt")
    with torch.no_grad():
        for param in expected.parameters():
            param.mul_(0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = model(*tokens(1, rank))
    assert torch.equal(loss, expected(*tokens(1, rank)))
    return _collectives(profile)["all_gather_into_tensor"]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_uncompiled_forward_gathers_each_parameter_once_while_there_are_gradients(ranks, stage):
    assert ranks(2).run(_gathers_with_gradients, stage) == [MATRICES, MATRICES]


@pytest.mark.parametrize(("stage", "reduce_once"), REDUCING_ONCE)
def test_low_precision_sums_are_kept_in_the_master_dtype(ranks, stage, reduce_once):
    ranks(2).run(_sum_of_many, stage, reduce_once)


def _sum_of_many(stage: int, reduce_once: bool | None) -> None:
    """Seventeen equal bf16 gradients: added up in bf16 the last ones would be lost."""

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return (self.weight * x).float().sum()

    model = dsgraph.partition(Scale(), stage=stage, keep_whole_below=0, param_dtype=torch.bfloat16)
    summands = [256.0] + [1.0] * 16
    for number, summand in enumerate(summands):
        is_last = number == len(summands) - 1
        with nullcontext() if is_last else dsgraph.accumulate(model, reduce_once=reduce_once):
            model(torch.full((4, 4), summand, dtype=torch.bfloat16)).backward()
    grad = full(next(model.parameters()).grad)
    assert grad.dtype is torch.float32
    assert torch.equal(grad, torch.full((4, 4), 272.0)), grad


def _unused_on_one_rank(stage: int, reduce_once: bool | None) -> None:
    """A parameter that only one rank uses is averaged with zeros; one that nobody uses keeps no gradient."""
    rank = dist.get_rank()
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    model = dsgraph.partition(layers, stage=stage, keep_whole_below=0)
    x = torch.ones(1, 2)
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        model[0](x).sum().backward()
    (model[0](x).sum() + (model[1](x).sum() if rank == 0 else 0)).backward()
    grads = [next(layer.parameters()).grad for layer in model]
    assert torch.equal(full(grads[0]), torch.full((2, 2), 2.0))
    assert torch.equal(full(grads[1]), torch.full((2, 2), 0.5))
    assert grads[2] is None


@pytest.mark.parametrize(("stage", "reduce_once"), REDUCING_ONCE[1:])
def test_unused_parameters(ranks, stage, reduce_once):
    ranks(2).run(_unused_on_one_rank, stage, reduce_once)


def _compare_tied(stage: int, reduce_once: bool | None) -> None:
    case = CASES["tied"]
    compare(case.build, case.batches, stage=stage, codegen=None, micro_batches=3, reduce_once=reduce_once)


@pytest.mark.parametrize(("stage", "reduce_once"), [*REDUCING_ONCE, (2, False), (3, False)])
def test_uncompiled_accumulation_matches_one_process(ranks, stage, reduce_once):
    ranks(2).run(_compare_tied, stage, reduce_once)


def _two_forwards_a_backward(stage: int, reduce_once: bool | None) -> None:
    rank = dist.get_rank()
    model, alone = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=20), build("gpt")
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        (model(*tokens(0, rank)) + model(*tokens(1, rank))).backward()
    (model(*tokens(2, rank)) * model(*tokens(3, rank))).backward()
    (alone(*tokens(0, rank)) + alone(*tokens(1, rank))).backward()
    (alone(*tokens(2, rank)) * alone(*tokens(3, rank))).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(full(mine.grad), theirs.grad / dist.get_world_size(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "reduce_once"), [*REDUCING_ONCE, (2, None)])
def test_no_local_gradient_counts_twice(ranks, stage, reduce_once):
    ranks(2).run(_two_forwards_a_backward, stage, reduce_once)


def _compare_reducing_once(case: str) -> None:
    compare(CASES[case].build, CASES[case].batches, stage=2, micro_batches=3, reduce_once=True)


@pytest.mark.parametrize(
    "case",
    (
        pytest.param("gpt", marks=pytest.mark.full),
        pytest.param("graph_break", marks=pytest.mark.full),  # test_stages has the pairs
        pytest.param("uneven", marks=pytest.mark.full),
        pytest.param("frozen", marks=pytest.mark.full),
    ),
)
def test_stage_2_reducing_once_matches_one_process(ranks, case):
    ranks(2).run(_compare_reducing_once, case)


def _train(
    stage: int, ways: list[list[bool | None]], codegen: str | None, dtype: torch.dtype | None, **options: object
) -> list[Tensor]:
    """Losses, gradients and parameters of steps whose micro-batches before the last run in these ways."""
    rank = dist.get_rank()
    build_model = _deep if "memory_limit" in options else partial(build, "small")
    model = dsgraph.partition(build_model(), stage=stage, keep_whole_below=20, param_dtype=dtype)
    runs = (
        model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen, **options})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = []
    for step, before_last in enumerate(ways):
        for micro, reduce_once in enumerate(before_last):
            with dsgraph.accumulate(model, reduce_once=reduce_once):
                runs(*tokens(10 * step + micro, rank)).backward()
        loss = runs(*tokens(10 * step + 9, rank))
        loss.backward()
        found += [loss.detach(), *(param.grad.to_local() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [param.to_local().detach().clone() for param in model.parameters()]
    return found


def _train_with(memory_limit: int | None, dtype: torch.dtype | None) -> list[Tensor]:
    return _train(3, [[None, None], [], [None], [None, None]], "eager", dtype, memory_limit=memory_limit)


def _compare_limits(dtype: torch.dtype | None) -> None:
    expected = _train_with(None, dtype)
    for limit in (200_000, 10**9):
        for ours, theirs in zip(_train_with(limit, dtype), expected, strict=True):
            assert torch.equal(ours, theirs), limit


def _deep() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(replace(SMALL, layers=3))


def _compare_held(codegen: str, mesh_shape: tuple[int, ...] | None) -> None:
    options = {"mesh_shape": mesh_shape, "micro_batches": 3, "evaluate": True, "memory_limit": 10**9}
    compare(_deep, tokens, stage=3, codegen=codegen, **options)


def test_what_is_held_for_a_step_matches_one_process(ranks):
    ranks(2).run(_compare_held, "eager", None)


@pytest.mark.full  # test_stages has the meshes
def test_hybrid_sharding_holds_what_its_inner_group_gathers(ranks):
    ranks(4).run(_compare_held, "eager", (2, 2))


@pytest.mark.full
@pytest.mark.inductor
def test_inductor_reads_what_is_held_for_a_step(ranks):
    ranks(2).run(_compare_held, "inductor", None)


@pytest.mark.full  # the same by numbers is below
@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
def test_what_is_held_for_a_step_changes_no_bit(ranks, dtype):
    ranks(2).run(_compare_limits, dtype)


def _same_as_stage_1(codegen: str | None, dtype: torch.dtype | None) -> None:
    mine = _train(2, [[True, True]] * 3, codegen, dtype)
    theirs = _train(1, [[None, None]] * 3, codegen, dtype)
    assert len(mine) == len(theirs)
    for ours, expected in zip(mine, theirs, strict=True):
        assert ours.dtype is expected.dtype and torch.equal(ours, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))
def test_stage_2_reducing_once_computes_the_bits_of_stage_1(ranks, codegen, dtype):
    ranks(2).run(_same_as_stage_1, codegen, dtype)


def _copy_in_mid_step(stage: int, reduce_once: bool | None, codegen: str | None) -> None:
    """A copy begins a step of its own, and the original goes on."""
    rank = dist.get_rank()
    model = dsgraph.partition(build("small"), stage=stage, keep_whole_below=0)

    def run(part: torch.nn.Module, number: int) -> None:
        runs = part if codegen is None else torch.compile(part, backend="dsgraph", options={"codegen": codegen})
        runs(*tokens(number, rank)).backward()

    expected = []
    for inside in ([0], []):  # what the original and the copy are to compute
        for number in inside:
            with dsgraph.accumulate(model, reduce_once=reduce_once):
                run(model, number)
        run(model, 1)
        expected.append([param.grad.to_local().clone() for param in model.parameters()])
        model.zero_grad()
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        run(model, 0)
        inner = deepcopy(model)
    outer = deepcopy(model)
    for part, grads in ((inner, expected[1]), (outer, expected[1]), (model, expected[0])):
        run(part, 1)
        for param, grad in zip(part.parameters(), grads, strict=True):
            torch.testing.assert_close(param.grad.to_local(), grad, rtol=1e-5, atol=1e-7)


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))
@pytest.mark.parametrize(("stage", "reduce_once"), REDUCING_ONCE)
def test_a_copy_has_no_part_in_the_step(ranks, stage, reduce_once, codegen):
    ranks(2).run(_copy_in_mid_step, stage, reduce_once, codegen)


def _mix(codegen: str | None) -> None:
    """Each step in another way, and steps in which the way changes."""
    ways = [[True, True], [None, None], [], [False, True], [True, False], [True, True]]
    mine = _train(2, ways, codegen, None)
    theirs = _train(2, [[None] * len(before_last) for before_last in ways], codegen, None)
    for ours, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codegen", (None, pytest.param("eager", marks=pytest.mark.full)))
def test_ways_of_accumulating_mix(ranks, codegen):
    ranks(2).run(_mix, codegen)


def _keep_local(stage: int, reduce_once: bool | None) -> list[tuple[bool, int]]:
    """After a micro-batch under accumulate: whether a gradient of each parameter takes memory, and bytes of its sum."""
    model = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=20)
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        model(*tokens(0, dist.get_rank())).backward()
    entries = model._dsgraph.partition.parameters
    assert not any(entry.leaf is not None and entry.leaf.grad is not None for entry in entries)
    held = [0 if entry.accumulated_grad is None else entry.accumulated_grad.nbytes for entry in entries]
    grads = [entry.param.grad for entry in entries]
    takes_memory = [grad is not None and grad.to_local().untyped_storage().nbytes() > 4 for grad in grads]
    return list(zip(takes_memory, held, strict=True))


def test_memory_of_gradients(ranks):
    """Reducing once costs a full gradient, as in stage 1, which stage 2 does not hold by itself."""
    full_bytes = [4 * param.numel() for param in build("gpt").parameters()]
    assert ranks(2).run(_keep_local, 2, True)[0] == [(False, size) for size in full_bytes]
    assert ranks(2).run(_keep_local, 1, None)[0] == [(False, size) for size in full_bytes]
    assert ranks(2).run(_keep_local, 2, None)[0] == [(True, 0) for _ in full_bytes]


# When a step is given up: in the middle of a micro-batch, between two, when the last has run its forward.
GIVEN_UP = ("inside", "between", "last_forward")


def _discard(when: str, model: torch.nn.Module, runs: Any, reduce_once: bool | None) -> Tensor | None:
    """A step that overflows and is given up; the result is a loss of which the backward has not run, if any is."""
    rank, loss = dist.get_rank(), None
    for micro in range(2):
        with dsgraph.accumulate(model, reduce_once=reduce_once):
            for _ in range(2 if when == "inside" else 1):
                (runs(*tokens(90 + micro, rank)) * float("inf")).backward()
                if when == "inside":
                    dsgraph.discard(model)
    if when == "last_forward":
        loss = runs(*tokens(92, rank))
    if when != "inside":
        dsgraph.discard(model)
    return loss


def _train_four_steps(stage: int, reduce_once: bool | None, codegen: str | None, *, discards: bool) -> list[Tensor]:
    """Return losses, gradients and parameters of four steps.

    With `discards`, one is abandoned before each but the first.
    """
    rank, found = dist.get_rank(), []
    model = dsgraph.partition(_deep(), stage=stage, keep_whole_below=20)
    options = {"codegen": codegen, "memory_limit": 10**9}  # with which stage 3 holds what it has gathered
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(1 + len(GIVEN_UP)):
        if discards and step:
            _discard(GIVEN_UP[step - 1], model, runs, reduce_once)
            if stage == 3:
                optimizer.zero_grad()  # what has been reduced
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()  # which nothing refuses: no gradient waits to be reduced
        for micro in range(2):
            with dsgraph.accumulate(model, reduce_once=reduce_once):
                runs(*tokens(10 * step + micro, rank)).backward()
        loss = runs(*tokens(10 * step + 2, rank))
        loss.backward()
        found += [loss.detach(), *(param.grad.to_local() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [param.to_local().detach().clone() for param in model.parameters()]
    return found


def _same_without(*how: Any) -> None:
    mine, alone = (_train_four_steps(*how, discards=discards) for discards in (True, False))
    assert len(mine) == len(alone) and all(map(torch.equal, mine, alone))


# Compiled at stage 3, which holds what it has gathered; sums that a graph was given and that are dropped are below.
@pytest.mark.parametrize(
    ("stage", "reduce_once", "codegen"),
    [
        *((*way, None) for way in REDUCING_ONCE),
        pytest.param(3, None, "eager", marks=pytest.mark.full),
        *(pytest.param(*way, "eager", marks=pytest.mark.full) for way in REDUCING_ONCE),
        pytest.param(3, None, None, marks=pytest.mark.full),
    ],
)
def test_a_discarded_step_leaves_no_trace(ranks, stage, reduce_once, codegen):
    ranks(2).run(_same_without, stage, reduce_once, codegen)


def _late_backward(stage: int, reduce_once: bool | None) -> None:
    """The backward of a graph that was given sums, after they were dropped, gives the gradient of its own batch."""
    found = []
    for gives_up in (True, False):
        model = dsgraph.partition(build("small"), stage=stage, keep_whole_below=20)
        runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        late = _discard("last_forward", model, runs, reduce_once) if gives_up else runs(*tokens(92, dist.get_rank()))
        assert late is not None
        late.backward()
        found.append([full(param.grad) for param in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("stage", "reduce_once"),
    [pytest.param(0, None, marks=pytest.mark.full), pytest.param(1, None, marks=pytest.mark.full), (2, True)],
)
def test_a_graph_that_was_given_sums_adds_none_after_discarding(ranks, stage, reduce_once):
    ranks(2).run(_late_backward, stage, reduce_once)


def _discard_reduced(stage: int) -> None:
    model = dsgraph.partition(build("gpt"), stage=stage, keep_whole_below=20)
    with dsgraph.accumulate(model):
        model(*tokens(0, dist.get_rank())).backward()
    before = [param.grad for param in model.parameters()]
    copies = [grad.to_local().clone() for grad in before]
    dsgraph.discard(model)
    for param, grad, copy in zip(model.parameters(), before, copies, strict=True):
        assert param.grad is grad and torch.equal(grad.to_local(), copy)


@pytest.mark.parametrize("stage", (2, 3))
def test_what_has_been_reduced_is_not_discarded(ranks, stage):
    ranks(2).run(_discard_reduced, stage)


def test_discarding_wants_a_partitioned_model():
    with pytest.raises(dsgraph.PartitionError, match="discard: no partitioned module in Linear; call"):
        dsgraph.discard(torch.nn.Linear(1, 1))


def test_expanded_gradients_of_one_rank_add_up(one_rank):
    """Autograd gives the operand of a sum over a dimension an expanded gradient, whose elements share memory."""
    model, alone = dsgraph.partition(build("uneven"), stage=1, keep_whole_below=12), build("uneven")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    for number in range(2):
        for run in (compiled, alone):
            run(*CASES["uneven"].batches(number, 0)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(full(mine.grad), theirs.grad)


FROZEN = {"freeze": (False, True, True), "unfreeze": (True, False, False), "between": (False, True, False)}


def _switch(stage: int, codegen: str | None, kind: str) -> None:
    """`requires_grad` of one parameter is switched between the micro-batches of a step."""

    def train(model: torch.nn.Module, runs: Any, rank: int, scale: float) -> list[Tensor]:
        first = next(model.parameters())
        for micro, frozen in enumerate(FROZEN[kind]):
            first.requires_grad_(not frozen)
            inside = hasattr(first, "device_mesh") and micro < 2
            with dsgraph.accumulate(model) if inside else nullcontext():
                (runs(torch.full((2, 4), micro + rank + 1.0)).square().sum() * scale).backward()
        return [full(param.grad) for param in model.parameters()]

    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    alone = net()
    train(alone, alone, 0, 0.5)
    expected = train(alone, alone, 1, 0.5)
    model = dsgraph.partition(net(), stage=stage, keep_whole_below=0)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    torch.testing.assert_close(train(model, runs, dist.get_rank(), 1.0), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", list(FROZEN))
@pytest.mark.parametrize(("stage", "codegen"), [(0, None), (1, None), (1, "eager")])
def test_requires_grad_is_switched_between_micro_batches(ranks, stage, codegen, kind):
    ranks(2).run(_switch, stage, codegen, kind)
