"""`dsgraph sparse`."""

from __future__ import annotations

import pytest


def test_modes_and_their_densities(call):
    printed = call("sparse", "--length", "512", "--json").json
    assert [row["mode"] for row in printed["layouts"]] == [
        *("dense", "fixed", "variable", "bigbird", "bslongformer", "local")
    ]
    assert printed["layouts"][0]["density"] == 1.0
    assert "bslongformer" in call("sparse", "bslongformer").out


def test_a_picture_is_drawn(call, tmp_path):
    pytest.importorskip("matplotlib")
    section = '{"mode": "fixed", "block": 8, "attention": "unidirectional"}'
    assert call("sparse", section, "dense", "--length", "100", "--plot", str(tmp_path / "a.svg")).code == 0
    assert "fixed: " in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sprase"], "mode is 'sprase'; it takes one of dense, fixed"),
        (['{"mode": "fixed", "blocks": 8}'], "'blocks' is no field of mode 'fixed'"),
        (['{"mode"'], "invalid JSON"),
        (["--length", "0"], "--length is 0"),
        (["--plot", "a.txt"], "it takes a file that ends in"),
    ],
)
def test_bad_input_is_one_line(call, arguments, said):
    printed = call("sparse", *arguments)
    assert printed.code == 2
    assert said in printed.err
