from __future__ import annotations

from dsgraph.tools.dumping.units import UnitGraph, runs_of, runs_text, spelled, units_of

LAYERS = ("layers.0", "layers.1", "layers.2")
FORWARD = "model.py:1 (Layer.forward)"


def of_layer(compiled, block, *, blocks=LAYERS, inside="", function=FORWARD):
    return UnitGraph(compiled, function, block + inside, block, blocks)


def test_equal_blocks_are_one_unit_between_what_runs_before_and_after():
    graphs = [UnitGraph(1, "embed"), of_layer(2, "layers.0"), UnitGraph(3, "head", "head")]
    before, layers, after = units_of(graphs)
    assert [unit.modules for unit in (before, layers, after)] == [("",), LAYERS, ("head",)]
    assert layers.graphs == ((2,),)


def test_a_block_with_a_graph_break_has_two_graphs():
    graphs = [of_layer(1, "layers.0"), of_layer(2, "layers.0", function=f"{FORWARD} after line 3")]
    (unit,) = units_of(graphs)
    assert unit.graphs == ((1,), (2,))


def test_a_newer_compile_replaces_an_older_one_in_the_same_place():
    graphs = [of_layer(1, "layers.0"), UnitGraph(2, "head"), of_layer(3, "layers.0"), UnitGraph(4, "head")]
    layers, head = units_of(graphs)
    assert (layers.modules, layers.graphs, head.graphs) == (LAYERS, ((3,),), ((4,),))
    assert runs_of([layers, head]) == {3: LAYERS, 4: ("",)}


def test_a_block_that_was_compiled_for_itself_is_a_unit_of_its_own():
    first, second, third = units = units_of([of_layer(1, "layers.0"), of_layer(2, "layers.1")])
    assert (first.modules, first.graphs) == (("layers.0",), ((1,),))
    assert (second.modules, second.graphs) == (("layers.1",), ((2,),))
    # Nothing tells which of the two it runs.
    assert (third.modules, third.graphs) == (("layers.2",), ((1, 2),))
    assert runs_of(units) == {1: ("layers.0",), 2: ("layers.1", "layers.2")}


def test_a_block_compiled_after_what_follows_it_still_runs_among_the_blocks():
    graphs = [of_layer(1, "layers.0"), UnitGraph(2, "head"), of_layer(3, "layers.2")]
    assert [unit.modules for unit in units_of(graphs)] == [("layers.0",), ("layers.1",), ("layers.2",), ("",)]


def test_blocks_follow_the_order_in_which_they_run_and_idle_ones_are_left_out():
    (unit,) = units_of([of_layer(1, "layers.2")], ahead=("layers.2", "layers.1"), without=("layers.0",))
    assert unit.modules == ("layers.2", "layers.1")


def test_a_graph_of_several_modules_has_a_remark():
    assert runs_text(LAYERS) == ", run 3 times in a step: by layers.0 ... layers.2 (3)"
    assert runs_text(("head",)) == runs_text(()) == ""


def test_names_are_shortened_where_they_count_up():
    assert spelled(LAYERS) == "layers.0 ... layers.2 (3)"
    assert spelled([f"layers.{number}" for number in (0, 2, 4, 6)]) == "layers.0, layers.2, layers.4 and 1 more"
    assert spelled(["a.0", "b.1", "c.2"]) == "a.0, b.1, c.2"
    assert spelled(["layers.0", "layers.1"]) == "layers.0 and layers.1"
