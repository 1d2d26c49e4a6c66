"""The saved values of a part, and the policy of each part, against all possible choices."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from dsgraph.passes.memory.assignment import Option, assign, needs
from dsgraph.passes.memory.forward_values import ForwardPart, Value
from dsgraph.passes.memory.policies import policies_of


@st.composite
def _parts(draw: st.DrawFn) -> ForwardPart:
    """A few values, each computed of some before it; the last one is read by the backward."""
    graph, nodes = Graph(), list[Node]()
    values = []
    for number in range(draw(st.integers(1, 6))):
        sources = draw(st.lists(st.sampled_from(nodes), unique=True, max_size=2)) if nodes else []
        node = graph.call_function(max, tuple(sources))
        is_forced = draw(st.sampled_from([None, None, None, True, False]))
        value = Value(
            node,
            bytes=draw(st.integers(1, 20)),
            seconds=float(draw(st.integers(1, 20))),
            sources=tuple(sources),
            saved=is_forced,
            needed=draw(st.booleans()) or number == 0,
        )
        nodes.append(node)
        values.append(value)
    return ForwardPart("", tuple(values), kind=None)


def _seconds(part: ForwardPart, saved: frozenset[int]) -> float:
    """Return the time to recompute the values that are needed and not saved."""
    number = {value.node: at for at, value in enumerate(part.values)}
    again: set[int] = set()
    frontier = [at for at, value in enumerate(part.values) if value.needed and at not in saved]
    while frontier:
        at = frontier.pop()
        if at in again or at in saved:
            continue
        again.add(at)
        frontier += [number[source] for source in part.values[at].sources]
    return sum(part.values[at].seconds for at in again)


def _all_choices(part: ForwardPart) -> list[tuple[int, float]]:
    found = []
    for bits in product([False, True], repeat=len(part.values)):
        if any(value.saved not in (None, bit) for value, bit in zip(part.values, bits, strict=True)):
            continue
        saved = frozenset(at for at, bit in enumerate(bits) if bit)
        found.append((sum(part.values[at].bytes for at in saved), _seconds(part, saved)))
    return found


@settings(max_examples=60, derandomize=True)
@given(_parts())
def test_no_choice_is_faster_within_the_same_memory(part):
    choices, found = _all_choices(part), policies_of(part)
    assert found[-1].bytes == min(size for size, _ in choices)
    assert abs(found[0].seconds - min(seconds for _, seconds in choices)) < 1e-6
    for policy in found:
        assert policy.seconds == _seconds(part, policy.saved)
        assert all(policy.seconds <= seconds + 1e-6 for size, seconds in choices if size <= policy.bytes)
    assert all(more.bytes > less.bytes for more, less in pairwise(found))


_options = st.builds(
    Option,
    seconds=st.integers(0, 9).map(float),
    saved=st.integers(0, 30),
    forward=st.integers(0, 30),
    backward=st.integers(0, 30),
)


def _peak(options: list[Option], in_flight: int) -> int:
    saved, peak = (in_flight - 1) * sum(option.saved for option in options), 0
    for option in options:
        peak = max(peak, saved + option.forward)
        saved += option.saved
        peak = max(peak, saved + option.backward)
    return peak


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.lists(_options, min_size=1, max_size=3), min_size=1, max_size=4), st.integers(1, 120), st.integers(1, 3)
)
def test_no_assignment_under_the_limit_is_faster(choices, limit, in_flight):
    every = [list(picked) for picked in product(*choices)]
    fitting = [picked for picked in every if _peak(picked, in_flight) <= limit]
    numbers = assign(choices, limit, in_flight=in_flight)
    assert (numbers is None) == (not fitting)
    if numbers is not None:
        taken = [part[number] for part, number in zip(choices, numbers, strict=True)]
        assert needs(taken, in_flight=in_flight) == _peak(taken, in_flight) <= limit
        best = min(sum(option.seconds for option in picked) for picked in fitting)
        assert sum(option.seconds for option in taken) <= best + 0.05
    least = assign(choices, None, in_flight=in_flight)
    assert least is not None
    taken = [part[number] for part, number in zip(choices, least, strict=True)]
    assert _peak(taken, in_flight) == min(_peak(picked, in_flight) for picked in every)
