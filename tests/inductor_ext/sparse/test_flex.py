"""FlexAttention with the layout's blocks: its masks, and its kernels, compiled for a GPU that need not be there."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dsgraph.inductor_ext.sparse import flex
from dsgraph.inductor_ext.sparse.block_attention import BlockAttention
from dsgraph.inductor_ext.sparse.reading import codes_of
from dsgraph.passes.analysis.hardware import GPUS
from dsgraph.sparse import BigBird, Dense, Fixed
from dsgraph.tools.emission.harness import fake_device
from dsgraph.tools.emission.lowering import compile_module, lower, retarget, trace

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


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("block", "dtype", "width"), [(32, torch.bfloat16, 64), (16, torch.bfloat16, 256), (4, torch.float32, 96)]
)
def test_inductor_and_triton_compile_both_kernels(block, dtype, width, tmp_path):
    q, k, v = _inputs(512, width, dtype)
    attention = _attention(Fixed(block=block))
    found = {}
    for graph, inputs, phase in _traced(q, k, v, attention):
        with fake_device("sm_90"):
            lowered = lower(*retarget(graph, inputs), phase=phase, patches={})
            kernels = [source for source in lowered.sources.values() if "tl.dot" in source[1]]
            found[phase] = [each for name, text in kernels for each in compile_module(text, name, path=tmp_path / "k")]
    assert set(found) == {"forward", "backward"}
    assert all(len(binaries) == 1 for binaries in found.values())
    assert all(each.shared_bytes <= GPUS["sm_90"].shared_bytes for (each,) in found.values())


def _traced(q, k, v, attention):
    """Graphs with FlexAttention, forward and backward, which torch's function itself refuses to make on a CPU."""
    captured, graphs = [], []

    def capture(gm, inputs):
        captured.append((gm, [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]))
        return gm.forward

    torch._dynamo.reset()
    mask, options = flex.block_mask(attention, q), flex.kernel_options(q, v)
    run = torch.compile(flex_attention, backend=capture, fullgraph=True, dynamic=False)
    run(q, k, v, block_mask=mask, scale=attention.scale, kernel_options=options)
    trace(*captured[0], patches={}, each_joint=lambda _: None, receive=lambda *graph: graphs.append(graph))
    return graphs


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
    from dsgraph.passes.compat import FakeTensorMode

    with fake_device("sm_90"), FakeTensorMode():
        q = torch.empty(1, HEADS, 64, width, dtype=dtype, device="cuda:0")
        reason = flex.why_not(q, q, _attention(Fixed(block=1)))
    assert reason is None if said is None else said in reason
