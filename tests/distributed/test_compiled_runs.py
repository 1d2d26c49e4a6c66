"""Ranks that run different compiled graphs, or one more than the others, raise together and name parameter and step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import dsgraph
from tests.names import reported

pytestmark = pytest.mark.distributed

EAGER = {"codegen": "eager"}


class Heads(nn.Module):
    """A trunk, and heads of equal shapes of which a forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Any, heads: tuple[int, ...] = (0,)) -> Any:
        return sum(self.heads[head](self.trunk(x)).square().mean() for head in heads)


def _model(stage: int, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = dsgraph.partition(Heads(), stage=stage, keep_whole_below=0, **arguments)
    return torch.compile(model, backend="dsgraph", options=EAGER)


def _said(function: Callable[..., object], *args: Any) -> str:
    started = time.perf_counter()
    with pytest.raises(RuntimeError) as caught:  # during a compile Dynamo may wrap it
        function(*args)
    assert "RanksDisagreeError" in repr(caught.value)
    assert time.perf_counter() - started < 10, "with a time-out of 60 s"
    return str(caught.value)


def _step(model: Any, *heads: int) -> None:
    model(torch.ones(2, 4), heads).backward()


def _different_heads(stage: int) -> str:
    model, rank = _model(stage), dist.get_rank()
    for head in (0, 1):
        _step(model, head)
    before = [param.grad.full_tensor() for param in model.parameters()]
    said = _said(_step, model, rank)
    after = [param.grad.full_tensor() for param in model.parameters()]
    assert all(map(torch.equal, before, after)), "no gradient was touched"
    _step(model, 1)  # and training goes on
    return said


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 3])
def test_graphs_of_equal_shapes_over_different_parameters(ranks, stage):
    for said in ranks(2).run(_different_heads, stage):
        assert "rank 0 runs the compiled" in said and "reads 'heads.0.weight' (3 of 4)" in said
        assert "rank 1 runs the compiled" in said and "reads 'heads.1.weight' (3 of 4)" in said
        assert f"{reported('Heads.forward')} (test_compiled_runs.py)" in said and "same parts of the model" in said


def _heads_of_ranks(stage: int, codegen: str | None) -> None:
    """Each rank trains the head that it has data for, as DDP does with `find_unused_parameters`."""
    torch.manual_seed(0)
    alone = Heads()
    model = dsgraph.partition(copy.deepcopy(alone), stage=stage, keep_whole_below=0)
    runs = torch.compile(model, backend="dsgraph", options=EAGER) if codegen else model
    with pytest.raises(dsgraph.PartitionError, match="call it after the block"), dsgraph.accumulate(model):
        dsgraph.allreduce_gradients(model)
    for number, heads in enumerate(((0, 1), (0, 0), (1, 0), (1, 1), (0, 1))):
        inputs = [torch.full((2, 4), 1.0 + number + rank) for rank in range(2)]
        with dsgraph.accumulate(model):
            runs(inputs[dist.get_rank()], heads[dist.get_rank() : dist.get_rank() + 1]).backward()
        dsgraph.allreduce_gradients(model)
        for head, x in zip(heads, inputs, strict=True):
            (alone(x, (head,)) / 2).backward()
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), (number, name)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=f"{number}, {name}")
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize("codegen", ("eager", None))
@pytest.mark.parametrize("stage", (0, 1))
def test_ranks_train_different_heads_at_stages_0_and_1(ranks, stage, codegen):
    ranks(2).run(_heads_of_ranks, stage, codegen)


def test_other_stages_reduce_in_each_backward(fake_ranks):
    model = dsgraph.partition(Heads(), stage=3)
    with pytest.raises(dsgraph.PartitionError, match=r"stage 3 has reduced gradients in each backward.*stage 0 or 1"):
        dsgraph.allreduce_gradients(model)


def _new_head_on_one_rank(stage: int) -> str:
    model = _model(stage)
    _step(model, 0)
    return _said(_step, model, dist.get_rank())


@pytest.mark.parametrize("stage", (1, 3))
def test_a_rank_that_compiles_while_the_others_run(ranks, stage):
    for said in ranks(2).run(_new_head_on_one_rank, stage):
        does = "runs the compiled forward" if stage == 3 else "gathers 6 parameters"
        assert f"rank 0 {does}" in said and f"rank 1 compiles a graph of {reported('Heads.forward')}" in said


def _skip_a_backward(stage: int) -> str:
    model, x = _model(stage), torch.ones(2, 4)
    _step(model, 0)

    def steps() -> None:
        loss = model(x)
        if dist.get_rank() == 0:
            loss.backward()
        model(x, (0, 1)).backward()

    return _said(steps)


def _skip_the_last_backward() -> str:
    model, x = _model(1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        loss = model(x)
        if dist.get_rank() == 0:
            loss.backward()
        optimizer.step()

    return _said(steps)


def test_the_advice_is_about_the_backward_that_is_missing(ranks):
    for said in ranks(2).run(_skip_the_last_backward):
        assert "rank 0 runs the compiled backward" in said and "rank 1 steps SGD" in said
        assert "Every backward and every optimizer step must run on all ranks or on none" in said


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 3])
def test_a_rank_that_skips_its_backward(ranks, stage):
    for said in ranks(2).run(_skip_a_backward, stage):
        assert "rank 0 runs the compiled backward" in said and "they diverge here" in said


def _one_more_evaluation(stage: int) -> str:
    model, x = _model(stage), torch.ones(2, 4)
    _step(model, 0)
    with torch.no_grad():
        for _ in range(2 + dist.get_rank()):
            if (dist.get_rank(), _) == (1, 2):
                return _said(model, x)
            model(x)
    return _said(_step, model, 0)


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 3))
def test_a_rank_that_evaluates_one_batch_more(ranks, stage):
    first, second = ranks(2).run(_one_more_evaluation, stage)
    assert first == second and "they diverge here" in first


def _one_step_less() -> str:
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for number in range(4):
            _step(model, 0)
            if (dist.get_rank(), number) != (1, 2):
                optimizer.step()

    return _said(steps)


def test_an_optimizer_that_steps_on_some_ranks_alone(ranks):
    for said in ranks(2).run(_one_step_less):
        assert "rank 0 steps SGD, after 2 optimizer steps, rank 1 runs the compiled backward" in said
        assert "optimizer step must run on all ranks" in said


def _one_rank_clips(stage: int) -> str:
    """One rank skips the last backward of its second step and clips, in a collective that is torch's."""
    model = _model(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for number in range(2):
            for batch in range(2):
                if (dist.get_rank(), number, batch) != (0, 1, 1):
                    _step(model, 0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return _said(steps)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_rank_that_clips_gradients_while_another_goes_on(ranks, stage):
    first, second = ranks(2).run(_one_rank_clips, stage)
    assert first == second
    assert "rank 0 computes the global gradient norm, as clip_grad_norm_ does, rank 1 " in first


def _evaluates_after_step() -> str:
    """After steps that ranks know, one rank's forward trains and the other's evaluates: both would run ahead."""
    model = _model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for number in range(5):
            with torch.set_grad_enabled((dist.get_rank(), number) != (1, 4)):
                loss = model(torch.ones(2, 4))
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return _said(steps)


def test_a_rank_that_evaluates_after_a_step(ranks):
    first, second = ranks(2).run(_evaluates_after_step)
    assert first == second and "they diverge here" in first


def _other_order_of_blocks() -> str:
    torch.manual_seed(0)
    blocks = dsgraph.partition(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), stage=3, keep_whole_below=0)
    for block in blocks:
        block.compile(backend="dsgraph", options=EAGER)

    def run(order: tuple[int, ...]) -> None:
        x = torch.ones(2, 4)
        for number in order:
            x = blocks[number](x)
        x.sum().backward()

    run((0, 1, 2))
    run((0, 1, 2))
    return _said(run, ((0, 1, 2), (1, 0, 2))[dist.get_rank()])


def test_equal_blocks_that_share_a_graph_are_told_apart(ranks):
    for said in ranks(2).run(_other_order_of_blocks):
        assert "'0.weight'" in said and "'1.weight'" in said


def _two_models_of_equal_names() -> str:
    models = [_model(3), _model(3)]
    for model in models:
        _step(model, 0)
    return _said(_step, models[dist.get_rank()], 0)


def test_models_of_equal_names_are_told_apart(ranks):
    for said in ranks(2).run(_two_models_of_equal_names):
        assert "trunk.weight of model" in said


def _unused_everywhere(stage: int) -> list[bool]:
    model = _model(stage)
    _step(model, 1)
    return [param.grad is None for param in model.parameters()]


@pytest.mark.parametrize("stage", (0, 3))
def test_heads_that_no_rank_uses_get_no_gradient(ranks, stage):
    assert ranks(2).run(_unused_everywhere, stage) == [[False, False, True, True, False, False]] * 2


def _step_from_a_part_of_the_gradient() -> list[bool]:
    torch.manual_seed(0)
    model = dsgraph.partition(Heads(), stage=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.full_tensor().clone() for param in model.parameters()]
    x, heads = torch.ones(2, 4), ((0,), (0, 0))[dist.get_rank()]
    _said(lambda: (model(x, heads).backward(), optimizer.step()))
    return [torch.equal(param.full_tensor(), old) for param, old in zip(model.parameters(), before, strict=True)]


def test_no_parameter_is_updated_from_gradients_that_ranks_have_no_equal_part_in(ranks):
    assert all(map(all, ranks(2).run(_step_from_a_part_of_the_gradient)))


class Exchange(nn.Module):
    """Rows that each rank sends to the others between two layers: `rows[a][b]` from rank `a` to rank `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, rows: Any, width: int = 8) -> Any:
        to, of = rows[dist.get_rank()], [each[dist.get_rank()] for each in rows]
        sent = self.before(x)[:, :width]
        found = funcol.all_to_all_single_autograd(sent, of, to, dist.group.WORLD)
        return nn.functional.pad(self.after.weight.sum() * torch.tanh(found), (0, 1)).square().sum()


def _exchange(stage: int) -> str:
    rank, steps, gradients = dist.get_rank(), (((1, 3), (2, 4)), ((0, 2), (5, 1))), []
    given = [(torch.randn(sum(rows[rank]), 8, generator=torch.Generator().manual_seed(rank)), rows) for rows in steps]
    for number in (None, stage):
        torch.manual_seed(0)
        model = Exchange() if number is None else dsgraph.partition(Exchange(), stage=number, keep_whole_below=0)
        run: Any = model if number is None else torch.compile(model, backend="dsgraph", options=EAGER)
        for x, rows in given:
            run(x, rows).backward()
        gradients.append([value.grad for value in model.parameters()])
    for plain, mine in zip(*gradients, strict=True):
        if plain is not None:
            dist.all_reduce(plain)
            torch.testing.assert_close(mine.full_tensor(), plain / 2)
    other = dsgraph.partition(Exchange(), stage=stage, keep_whole_below=0)
    torch.compiler.reset()
    return _said(torch.compile(other, backend="dsgraph", options=EAGER), *given[0], 7 - rank)


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 3))
def test_ranks_choose_how_many_rows_they_exchange(ranks, stage):
    for said in ranks(2).run(_exchange, stage):
        assert "different collectives" in said
