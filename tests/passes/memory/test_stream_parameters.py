"""`StreamForwardParameters`, `StreamBackwardParameters`: where reads start, and where their results are taken."""

from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import PassError
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.ir.parameters import ParameterSpec
from dsgraph.passes.memory.stream_parameters import StreamBackwardParameters, StreamForwardParameters
from tests.passes.tracing import code, run_pass, trace

ops = torch.ops.dsgraph


def _net(x, first, second, third):
    return torch.relu(torch.relu(x @ first) @ second) @ third, second


def _params(gm, tiers):
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")][1:]
    shape = (8, 8)
    return {
        name: ParameterSpec(name, shape, shape, torch.float32, "0", True, tier)
        for name, tier in zip(names, tiers, strict=True)
    }


def _graph():
    return trace(_net, *(torch.randn(8, 8) for _ in range(4)))


def _streamed(graph_pass, tiers):
    gm = _graph()
    return gm, run_pass(graph_pass, gm, params=_params(gm, tiers))


@pytest.mark.parametrize("kind", [StreamForwardParameters, StreamBackwardParameters])
def test_each_is_read_while_the_one_before_is_used(kind):
    gm, result = _streamed(kind(ahead_bytes=1), ("disk", "disk", "disk"))
    assert result.changed == 3
    order = FileCheck()
    for line in ("fetch", "fetch", "take", "fetch", "mm", "take", "mm", "take", "mm"):
        order = order.check(f"{line}_parameter.default(" if line != "mm" else "mm.default(")
    order.run(code(gm))


def test_more_are_read_ahead_where_they_may():
    gm, _ = _streamed(StreamForwardParameters(), ("disk", "disk", "disk"))
    FileCheck().check_count("fetch_parameter", 3).check("take_parameter").run(code(gm))


def test_what_is_in_memory_or_handed_on_stays():
    gm, result = _streamed(StreamForwardParameters(), ("", "disk", ""))
    (taken,) = find_calls(gm, ops.take_parameter.default)
    assert result.changed == 1
    assert {user.op for user in taken.users} == {"call_function"}, "the backward is given the place, not the numbers"
    returned = gm.graph.output_node().args[0][1]
    assert returned.op == "placeholder"
    assert _streamed(StreamForwardParameters(), ("", "", ""))[1].changed == 0


def test_the_verifier_refuses_a_read_that_nobody_takes():
    class Careless(StreamForwardParameters):
        def run(self, gm, ctx):
            found = super().run(gm, ctx)
            for taken in find_calls(gm, ops.take_parameter.default)[1:]:
                taken.args = (find_calls(gm, ops.fetch_parameter.default)[0], taken.args[1])
            return found

    with pytest.raises(PassError, match="its one user must be its one take_parameter"):
        _streamed(Careless(), ("disk", "disk", "disk"))


def _backward(dy, first, second, third):
    return third.clone(), ((dy @ first.t()) @ second.t()) @ third.t()


def _stored_early(graph_pass):
    """Return a graph in which the third parameter's gradient is stored before all reads.

    It is read when the first one was taken.
    """
    gm = trace(_backward, *(torch.randn(8, 8) for _ in range(4)))
    dy, *_, rows = gm.graph.find_nodes(op="placeholder")
    copy = next(iter(rows.users))
    copy.replace_all_uses_with(dy)
    gm.graph.erase_node(copy)
    with gm.graph.inserting_after(rows):
        store = gm.graph.call_function(ops.store_gradient.default, (dy, rows))
        store.meta["val"] = dy.meta["val"]
    (output,) = gm.graph.output_node().args
    gm.graph.output_node().args = ((*output, store),)
    gm.recompile()
    run_pass(graph_pass, gm, params=_params(gm, ("disk", "disk", "disk")))
    return gm, store


def test_a_gradient_is_stored_behind_the_last_read_of_its_parameter():
    gm, store = _stored_early(StreamBackwardParameters(ahead_bytes=1))
    *_, fetch = find_calls(gm, ops.fetch_parameter.default)
    assert find_calls(gm, ops.take_parameter.default)[0] < fetch
    assert fetch < store and store.args[2] is fetch, "from then on the parameter may be updated"


def test_the_verifier_refuses_a_read_behind_the_gradient():
    class Careless(StreamForwardParameters):
        """Leaves gradients where they are."""

    with pytest.raises(PassError, match=r"does not depend on fetch_parameter_default\w*, which reads it"):
        _stored_early(Careless())
