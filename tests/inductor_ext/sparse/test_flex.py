"""FlexAttention with the layout's blocks: what its masks skip, and that they are kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dsgraph.inductor_ext.sparse import flex
from dsgraph.inductor_ext.sparse.block_attention import BlockAttention
from dsgraph.inductor_ext.sparse.reading import codes_of
from dsgraph.sparse import BigBird, Dense, Fixed

HEADS = 4


def _attention(layout, *, mask=None, causal=True):
    return BlockAttention(layout.text, mask, None, scale=0.3, dropout_p=0.0, causal=causal)


def _inputs(length, width=16, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, length, width, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("length", [512, 500])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "layout",
    [Fixed(block=16), BigBird(block=32, different_layout_per_head=True), Fixed(block=48), Fixed(block=256), Dense()],
    ids=lambda layout: f"{layout.mode}-{layout.block}",
)
def test_blocks_of_the_mask_are_skipped_or_whole_as_the_layout_says(layout, masked, length):
    q = _inputs(length)[0]
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool) if masked else None
    made = flex.block_mask(_attention(layout, mask=mask), q)
    tokens = codes_of(layout.text, HEADS, length, causal=True).tokens(length)
    for i in range(4):
        for j in range(4):
            at = tokens[:, i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].flatten(1)
            partial, whole = (_has(*lists, i, j) for lists in _lists(made))
            assert (partial | whole | ~at.any(-1)).all(), (i, j)
            assert (at.all(-1) | ~whole).all(), (i, j)
            if 128 % layout.block == 0:
                assert torch.equal(partial | whole, at.any(-1)), (i, j)
                assert torch.equal(whole, at.all(-1) & (mask is None)), (i, j)


def _lists(made):
    return (made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices)


def _has(counts, indices, i, j):
    """Which heads' lists for row `i` of blocks contain column `j`."""
    listed = torch.arange(indices.shape[-1]) < counts[0, :, i, None]
    return ((indices[0, :, i] == j) & listed).any(-1)


@pytest.fixture
def captured(monkeypatch):
    """Dynamo captures and guards as always; Inductor, which takes long for a CPU, makes no kernels."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "_compiled", lambda: torch.compile(flex_attention, backend="eager", fullgraph=True))


@pytest.mark.parametrize("masked", [False, True])
def test_a_second_call_makes_no_mask_and_compiles_nothing(masked, captured):
    q, k, v = _inputs(256)
    for number in range(2):
        mask = torch.rand(2, 1, 1, 256) > 0.2 if masked else None
        attention = _attention(Fixed(block=16), mask=mask)
        plain = flex.flex(q, k, v, attention, compiled=False)
        made = flex._layout_mask.cache_info().misses
        with torch._dynamo.config.patch(error_on_recompile=number == 1):
            torch.testing.assert_close(flex.flex(q, k, v, attention), plain, rtol=1e-5, atol=1e-5)
        assert flex._layout_mask.cache_info().misses == made


def test_many_attentions_stay_compiled(captured):
    for block in range(1, 11):  # Dynamo's default would compute the ninth without kernels
        q, k, v = _inputs(32)
        flex.flex(q, k, v, _attention(Fixed(block=block)))


@pytest.mark.parametrize(
    ("dtype", "width", "said"),
    [
        (torch.float64, 64, "no kernel for torch.float64"),
        (torch.bfloat16, 8, "16 to 256 wide, not 8 and 8"),
        (torch.bfloat16, 320, "not 320"),
        (torch.float32, 80, None),
    ],
)
def test_what_has_no_kernel_is_refused(dtype, width, said):
    q = SimpleNamespace(shape=(1, HEADS, 64, width), dtype=dtype, device=torch.device("cuda"))
    reason = flex.why_not(q, q, _attention(Fixed(block=1)))
    assert reason is None if said is None else said in reason
