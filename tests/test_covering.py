from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import cover, covering, subsets

pytest_plugins = ["pytester"]

AXES = {"stage": (0, 1, 2, 3), "codegen": (None, "eager", "inductor"), "once": (True, False, None), "ranks": (1, 2, 3)}


def _tuples(rows, strength):
    return {some for row in rows for some in combinations(enumerate(row), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 16), (3, 50), (4, 108)])
def test_every_tuple_of_values_appears_in_few_members(strength, most):
    chosen = covering(AXES, strength=strength)
    assert _tuples(chosen, strength) == _tuples(product(*AXES.values()), strength)
    assert len(chosen) == len(set(chosen)) <= most
    assert chosen == covering(AXES, strength=strength)


def test_values_that_are_equal_but_not_the_same_are_two():
    assert len(covering({"a": (True, 1, 1.0), "b": (0,)})) == 3


def test_members_that_are_not_there_are_not_asked_for():
    def where(stage, codegen, once, ranks):
        return not once or stage == 2

    chosen = covering(AXES, where=where)
    there = [row for row in product(*AXES.values()) if where(*row)]
    assert set(chosen) <= set(there)
    assert _tuples(chosen, 2) == _tuples(there, 2)


def test_ties_go_to_values_that_are_rare_so_far_and_then_to_the_first():
    assert covering({"a": range(4), "b": (0, 1)}, strength=1) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert cover([(0, 0), (0, 0), (1, 0), (1, 1), (1, 1)]) == [0, 2, 3]
    assert cover([(0,), (1,), (1,)]) == [0, 1]
    assert cover([]) == []


@pytest.mark.parametrize(("count", "most"), [(1, 3), (2, 4), (12, 8), (40, 10)])
def test_subsets_hold_both_of_any_two_one_of_them_and_none(count, most):
    found = subsets(range(count))
    assert found[0] == () and len(found) <= most
    for pair in combinations(range(count), 2):
        assert {frozenset(pair) & set(subset) for subset in found} == {
            *map(frozenset, ((), pair[:1], pair[1:], pair)),
        }


TESTS = """
import pytest
import torch

@pytest.mark.covering
@pytest.mark.parametrize("a", (True, 1, None))
@pytest.mark.parametrize(("b", "c"), [(torch.float32, {}), (torch.bfloat16, {})])
@pytest.mark.parametrize("d", [lambda: 0, lambda: 1])
def test_pairs(a, b, c, d):
    pass

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", "xyz")
def test_values(a, b):
    pass

@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", "xyz")
def test_whole(a, b):
    pass

@pytest.mark.covering
def test_alone():
    pass
"""


def test_members_outside_the_array_are_marked(pytester):
    pytester.makeconftest("""
import pytest
from tests.covering import mark_members

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_members(items)
""")
    pytester.makeini("[pytest]\nmarkers =\n  full\n  covering(strength=2)")
    pytester.makepyfile(TESTS)

    def count(*arguments: str) -> dict[str, int]:
        run = pytester.inline_run("-p", "no:cacheprovider", *arguments)
        names = [report.nodeid.split("::")[1].split("[")[0] for report in run.getreports("pytest_runtest_logreport")]
        return {name: names.count(name) // 3 for name in dict.fromkeys(names)}

    assert count() == {"test_pairs": 12, "test_values": 9, "test_whole": 9, "test_alone": 1}
    assert count("-m", "not full") == {"test_pairs": 6, "test_values": 3, "test_whole": 9, "test_alone": 1}
