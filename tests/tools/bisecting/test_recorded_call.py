from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dsgraph.tools.bisecting.recorded_call import RecordedCall, Tolerance, compare, difference

INF, NAN = math.inf, math.nan


def test_inputs_outputs_and_gradients_of_a_call_are_named():
    weight, x = nn.Parameter(torch.tensor([2.0, 3.0])), torch.tensor([1.0, 10.0])
    values = RecordedCall([weight, x, 5], ["weight", "x", "number"]).run(lambda w, x, n: ((w * x).sum() * n, n))
    assert values["output 0"] == 160.0
    assert values["output 1"] == 5
    assert torch.equal(values["gradient of weight"], torch.tensor([5.0, 50.0]))
    assert "gradient of x" not in values
    assert weight.grad is None


def test_the_program_does_not_notice():
    buffer, x = torch.zeros(3), torch.randn(3, requires_grad=True)
    replay = RecordedCall([buffer, x * 1.0], ["buffer", "x"])

    def compiled(buffer, x):
        buffer.add_(1)
        x.mul_(2)
        return ((x + torch.rand(3)) * buffer,)

    state = torch.get_rng_state()
    first, second = replay.run(compiled), replay.run(compiled)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(buffer, torch.zeros(3))
    assert torch.equal(first["buffer as the graph leaves it"], torch.ones(3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert x.grad is None


def test_copies_share_memory_where_the_inputs_do_and_have_their_strides():
    whole = torch.arange(12.0).reshape(3, 4)
    seen = []
    RecordedCall([whole, whole.t(), whole[1:, ::2]], ["a", "b", "c"]).run(lambda *args: [seen.extend(args)])
    assert [x.stride() for x in seen] == [(4, 1), (1, 4), (4, 2)]
    seen[0].zero_()
    assert not seen[1].any() and not seen[2].any()
    assert whole.any()


def test_cotangents_differ_from_output_to_output_and_are_one_for_a_loss():
    x = torch.randn(4, requires_grad=True)
    values = RecordedCall([x], ["x"]).run(lambda x: (x * 1, x * 1))
    assert values["gradient of x"].unique().numel() == 4
    assert torch.equal(RecordedCall([x], ["x"]).run(lambda x: (x.sum(),))["gradient of x"], torch.ones(4))


@pytest.mark.parametrize(
    ("expected", "found", "is_off"),
    [
        ([1.0, 100.0], [1.0, 100.0], False),
        ([1.0, 100.0], [1.001, 100.0], False),  # 1e-5 of the largest
        ([1.0, 100.0], [1.002, 100.0], True),
        ([1e-9, 0.0], [1.5e-9, 0.0], True),
        ([NAN, INF, 1.0], [NAN, INF, 1.0], False),
        ([NAN, INF, 1.0], [1.0, INF, 1.0], True),
        ([NAN, INF, 1.0], [NAN, -INF, 1.0], True),
        ([1.0], [INF], True),
        ([], [], False),
        ([1.0], [1.0, 2.0], True),
        (None, [0.0], False),  # a gradient that is None is nought
        (None, [1e-3], True),
        ([1e-3], None, True),
        (3, 3, False),
        (3, 4, True),
    ],
)
def test_differences(expected, found, is_off):
    a, b = (torch.tensor(x) if isinstance(x, list) else x for x in (expected, found))
    assert difference(a, b, Tolerance()).is_off == is_off


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2), (torch.float64, 1e-7)])
def test_the_tolerance_is_that_of_the_dtype(dtype, slack):
    value = torch.ones(3, dtype=torch.float64)
    assert not difference(value.to(dtype), (value + slack).to(dtype), Tolerance()).is_off
    assert difference(value.to(dtype), (value + 3 * slack).to(dtype), Tolerance()).is_off


def test_a_tolerance_of_nought_is_exact():
    one = torch.ones(3)
    assert difference(one, one + 2e-7, Tolerance(0.0, 0.0)).is_off
    assert not difference(one, one.clone(), Tolerance(0.0, 0.0)).is_off
    assert not difference(one, one + 0.5, Tolerance(atol=1.0)).is_off


def test_the_rounding_of_large_gradients_is_forgiven_to_one_that_is_nought():
    large, noise = torch.full((3,), 10.0), torch.full((3,), 1e-6)
    expected = {"gradient of q": large, "gradient of k": noise}
    assert not compare(expected, {**expected, "gradient of k": -noise}, Tolerance())["gradient of k"].is_off
    assert compare(expected, {**expected, "gradient of k": 100 * noise}, Tolerance())["gradient of k"].is_off
    assert compare({"output 0": large, "output 1": noise}, {"output 0": large, "output 1": -noise}, Tolerance())[
        "output 1"
    ].is_off


def test_a_value_that_only_one_of_the_two_has_is_compared_as_well():
    found = {"output 0": torch.ones(2), "buffer as the graph leaves it": torch.ones(2)}
    apart = compare({"output 0": torch.ones(2)}, found, Tolerance())
    assert [name for name, one in apart.items() if one.is_off] == ["buffer as the graph leaves it"]
