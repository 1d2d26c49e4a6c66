"""Values come back with their types, or are refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.typed_json import decode, encode

KEPT = [
    *(None, True, 2**80, -0.0, float("inf"), complex(1, float("inf")), "é\n", b"\0\xff", bytearray(b"x"), Path("/a")),
    *((1, (2,)), [1, (2,)], {4: 1, "a": (2,)}, {"!": 1}, {(1, 2): {3}}, {True: 1, None: 2}, frozenset([1])),
    *(Counter({4: 1}), OrderedDict(b=1, a=2), deque([1, 2], 3), torch.Size([2]), torch.bfloat16, torch.device("cpu")),
]
TENSORS = [
    *(torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.empty(0, 3), torch.tensor([True])),
    *(torch.ones(2).bfloat16(), torch.tensor([1 + 2j]).conj()),
]
ARRAYS = [np.float32(2.5), np.float64(1.1), np.int64(3), np.bool_(True), np.arange(6).reshape(2, 3).T, np.array(3.0)]


def _again(value: object) -> object:
    found = decode(json.loads(json.dumps(encode(value, "it"), allow_nan=False)))
    assert type(found) is type(value)
    return found


def test_values_come_back_with_their_types():
    for value in KEPT:
        assert repr(_again(value)) == repr(value)
    assert math.isnan(_again(float("nan")))
    for value in TENSORS:
        torch.testing.assert_close(_again(value), value, rtol=0, atol=0)
    for value in ARRAYS:
        found = _again(value)
        assert found.dtype == value.dtype and np.array_equal(found, value)


class _Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"of": [object()]}, r"it\['of'\]\[0\] is a object, which a checkpoint cannot store"),
        ({object(): 1}, "a key of it is a object"),
        ([lambda: 0], r"it\[0\] is a function"),
        (_Number.ONE, "it is a _Number"),
        (namedtuple("Pair", "a")(1), "it is a Pair"),
        (defaultdict(int), "it is a defaultdict"),
        (np.array(["a"]), "it is a ndarray"),
        (torch.nn.Parameter(torch.ones(1)), "it is a Parameter"),
        (torch.ones(1, requires_grad=True), "requires a gradient"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_come_back_is_named(value, said):
    with pytest.raises(CheckpointError, match=said):
        encode(value, "it")


def test_what_holds_itself_is_named():
    value: dict[str, object] = {}
    value["inner"] = [value]
    with pytest.raises(CheckpointError, match=r"it\['inner'\]\[0\] contains itself"):
        encode(value, "it")
    twice = [1]
    assert _again([twice, twice]) == [[1], [1]]


def test_unknown_and_damaged_kinds_are_refused():
    for value in ({"!": "module"}, {"!": []}, {"!": "tensor", "dtype": "save", "shape": [], "value": ""}):
        with pytest.raises(CheckpointError, match="kind"):
            decode(value)
