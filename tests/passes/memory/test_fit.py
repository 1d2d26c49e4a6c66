"""What ranks agree on under a limit."""

from __future__ import annotations

from dsgraph.passes.memory.fit import Proposal, decide


def test_a_refusal_is_that_of_the_rank_that_needs_most():
    found = decide({0: Proposal(None, (), 0.0, 100, refusal="100 at least"), 1: Proposal(None, (), 0.0, 200, "200")})
    assert found.refusal == "200"


def test_a_plan_is_that_of_the_rank_that_computes_most_again():
    found = decide(
        {0: Proposal(("a",), ("b",), 2.0, 10), 1: Proposal(None, (), 0.0, 20), 2: Proposal(("a",), (), 1.0, 30)}
    )
    assert (found.saved, found.seconds) == (("a",), 2.0)
