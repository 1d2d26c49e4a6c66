"""Layouts: their blocks, their text, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from dsgraph.sparse import (
    MODES,
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    SparseLayoutError,
    Variable,
    from_block_mask,
    from_mask_mod,
    layout_of,
)


def _drawn(layout, count, head=0):
    return ["".join(".#"[int(seen)] for seen in row) for row in layout.blocks(head, count)]


def test_fixed_has_windows_and_columns_that_all_see():
    assert _drawn(Fixed(num_local_blocks=2), 4) == ["##.#", "##.#", ".###", ".###"]
    assert _drawn(Fixed(num_local_blocks=2, horizontal_global_attention=True), 4) == ["##.#", "####", ".###", "####"]


def test_heads_of_fixed_take_turns():
    layout = Fixed(num_local_blocks=2, different_layout_per_head=True, num_different_global_patterns=2)
    assert _drawn(layout, 4, head=1) == ["###.", "###.", "#.##", "#.##"]
    assert layout.codes(4, 64).codes.shape == (4, 4, 4)


def test_the_last_window_of_fixed_may_be_short():
    assert _drawn(Fixed(num_local_blocks=4), 5) == ["#####", "#####", "#####", "#####", "...##"]


def test_variable_has_windows_of_its_sizes():
    layout = Variable(local_window_blocks=(1, 2), global_block_indices=(4,), horizontal_global_attention=True)
    assert _drawn(layout, 5) == ["#...#", ".##.#", ".##.#", "...##", "#####"]


def test_longformer_and_bigbird_have_sliding_windows_and_first_blocks():
    expected = ["#####", "###..", "####.", "#.###", "#..##"]
    assert _drawn(BSLongformer(), 5) == expected
    assert _drawn(BigBird(num_random_blocks=0), 5) == expected
    ranges = BSLongformer(num_sliding_window_blocks=1, global_block_indices=(1,), global_block_end_indices=(3,))
    assert _drawn(ranges, 4) == ["###.", "####", "####", ".###"]


def test_random_blocks_are_the_same_each_time_and_differ_by_head():
    layout = BigBird(num_random_blocks=2, num_global_blocks=0, different_layout_per_head=True)
    assert torch.equal(layout.blocks(0, 32), layout.blocks(0, 32))
    assert not torch.equal(layout.blocks(0, 32), layout.blocks(1, 32))
    assert layout.blocks(0, 32).sum() > LocalSlidingWindow().blocks(0, 32).sum() + 32


def test_one_way_layouts_show_no_later_key():
    for layout in (Fixed(attention="unidirectional"), BigBird(attention="unidirectional"), LocalSlidingWindow()):
        tokens = layout.codes(1, 200).tokens(200)
        assert not tokens.triu(1).any()
        assert tokens.diagonal(dim1=1, dim2=2).all()


def test_density_and_flops_are_counted():
    layout = Fixed(num_local_blocks=2)
    assert layout.density(12, 64) == 0.75
    assert layout.flops(12, 64, 8) == 4 * 12 * 12 * 16 * 16 * 8
    assert Dense().flops(2, 64, 8) == 4 * 2 * 64 * 64 * 8


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "custom"])
def test_a_layout_is_read_from_its_text(mode):
    layout = layout_of({"mode": mode, "block": 8})
    import json

    assert layout_of(json.loads(layout.text)) == layout


def test_a_mask_of_blocks_is_a_layout():
    mask = torch.rand(3, 5, 5) > 0.5
    layout = from_block_mask(mask, block=4, length=18)
    codes = layout.codes(3, 18)
    assert torch.equal(codes.codes != 0, mask)
    assert not torch.equal(codes.codes[:, :, -1], layout.codes(3, 18).codes[:, :, 0])
    with pytest.raises(SparseLayoutError, match="made for 18 tokens, and there are 20"):
        layout.codes(3, 20)
    with pytest.raises(SparseLayoutError, match="made for 3 heads, and there are 4"):
        layout.codes(4, 18)


@pytest.mark.parametrize("length", [64, 61])
def test_a_mask_function_keeps_every_token(length):
    def near(b, h, q, k):
        return ((q - k).abs() < 5 + h) | (k == 3)

    layout = from_mask_mod(near, length=length, heads=2, block=8)
    place = torch.arange(length)
    expected = torch.stack([((place[:, None] - place).abs() < 5 + h) | (place == 3) for h in range(2)])
    assert torch.equal(layout.codes(2, length).tokens(length), expected)
    assert len(layout.codes(2, length).patterns) < 16


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"mode": "fixt"}, "mode is 'fixt'; it takes one of dense, fixed"),
        ({"mode": "fixed", "num_sliding_window_blocks": 3}, "'num_sliding_window_blocks' is no field of mode 'fixed'"),
        ({"mode": "fixed", "block": "16"}, "Fixed: block is '16'; it takes a value such as 16"),
        ({"mode": "fixed", "num_global_blocks": 5}, "it takes 0 to num_local_blocks, 4"),
        ({"mode": "fixed", "num_different_global_patterns": 2}, "unless different_layout_per_head"),
        ({"mode": "bigbird", "attention": "both"}, "'bidirectional' or 'unidirectional'"),
        ({"mode": "bslongformer", "global_block_end_indices": [1, 2]}, "one end, above its start"),
        ({"mode": "variable", "local_window_blocks": []}, "sizes of 1 or more"),
        (
            {"mode": "variable", "attention": "unidirectional", "horizontal_global_attention": True},
            "False with attention='unidirectional'",
        ),
    ],
)
def test_what_cannot_be_is_refused(section, said):
    with pytest.raises(SparseLayoutError, match=said):
        layout_of(section)
