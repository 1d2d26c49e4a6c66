"""Functions that are recorded once, and copied for further tensors of the same sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from dsgraph.passes.compat import storage_id
from dsgraph.passes.ir.graph import fake_value, find_calls, placeholders
from dsgraph.passes.ir.recording import Recordings
from tests.passes.tracing import trace

aten = torch.ops.aten


def _calls(function, *options, shapes=((4, 2), (4, 2))):
    """Record a function of each input before the output, with an option of its own each."""
    gm = trace(lambda x, y: (x.sin(), y.sin()), *map(torch.randn, shapes))
    (output,) = gm.graph.find_nodes(op="output")
    ran, recordings = [], Recordings()

    def counted(x):
        ran.append(x)
        return function(x)

    written = [
        recordings.write(output, counted, node, *option) for node, option in zip(placeholders(gm), options, strict=True)
    ]
    gm.graph.lint()
    return gm, written, len(ran)


def test_a_copy_has_the_nodes_of_the_recording_with_values_of_its_own():
    gm, ((*made, first), (*copied, second)), ran = _calls(lambda x: x.exp().view(8).cos(), (), ())
    assert ran == 1 and (first, second) == (made[-1], copied[-1])
    assert [node.target for node in made] == [node.target for node in copied]
    assert find_calls(gm, aten.exp.default)[1].args == (placeholders(gm)[1],)
    made, copied = ([node for node in nodes if isinstance(fake_value(node), Tensor)] for nodes in (made, copied))
    for one, other in zip(made, copied, strict=True):
        mine, theirs = fake_value(one), fake_value(other)
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert storage_id(mine) != storage_id(theirs) and mine.fake_mode is theirs.fake_mode
    exp, view, _ = map(fake_value, copied)
    assert storage_id(exp) == storage_id(view), "a view shares memory in the copy, too"


def test_what_differs_is_recorded_again():
    def double(x):
        return x * 2

    assert _calls(double, (1,), (2,))[2] == 2
    assert _calls(double, (), (), shapes=((4, 2), (2, 4)))[2] == 2


def test_a_function_that_returns_its_input_writes_nothing():
    gm, written, _ = _calls(lambda x: x, (), ())
    assert written == [[node] for node in placeholders(gm)]
