from __future__ import annotations

import pytest
import torch

import dsgraph
from examples import custom_pass
from tests.passes.tracing import code, run_pass, trace


def test_the_example_runs_and_shows_the_graph_before_and_after(capsys):
    custom_pass.main()
    before, after = capsys.readouterr().out.split("passes:")[1:]
    assert before.count("_to_copy.default") == 2
    assert after.count("_to_copy.default") == 0


def test_a_cast_that_loses_bits_is_left_alone():
    gm = trace(lambda x: (x.to(torch.bfloat16).float(),), torch.randn(3))
    before = code(gm)
    assert run_pass(custom_pass.fold_casts, gm).changed == 0
    assert code(gm) == before


def _gradients(move: bool) -> list[torch.Tensor]:
    passes = dsgraph.default_pipeline()
    model, grads = custom_pass.train(passes + custom_pass.gather_one_unit_earlier if move else passes)
    step = next(item for item in dsgraph.report(model).compiles if item.kind == "step")
    changed = {item.name: item.changed for item in step.passes}.get("gather_one_unit_earlier", 0)
    assert (changed > 0) is move
    return grads


@pytest.mark.distributed
def test_a_pass_of_the_step_moves_gathers(ranks):
    for moved, left in zip(ranks(2).run(_gradients, True), ranks(2).run(_gradients, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(moved, left, strict=True))
