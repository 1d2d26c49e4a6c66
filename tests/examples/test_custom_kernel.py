from __future__ import annotations

from examples import custom_kernel


def test_the_example_runs_and_says_what_it_substituted(capsys):
    custom_kernel.main()
    assert "squared_relu in 1 place" in capsys.readouterr().out
