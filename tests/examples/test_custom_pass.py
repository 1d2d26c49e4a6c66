from __future__ import annotations

import torch

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
