"""FlexAttention's kernels for the layout's blocks, compiled for a GPU that need not be there."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dsgraph.inductor_ext.sparse import flex
from dsgraph.inductor_ext.sparse.block_attention import BlockAttention
from dsgraph.passes.analysis.hardware import GPUS
from dsgraph.sparse import Fixed
from dsgraph.tools.emission.harness import fake_device
from dsgraph.tools.emission.lowering import compile_module, lower, retarget, trace


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("block", "dtype", "width"), [(32, torch.bfloat16, 64), (16, torch.bfloat16, 256), (4, torch.float32, 96)]
)
def test_inductor_and_triton_compile_both_kernels(block, dtype, width, tmp_path):
    q, k, v = (torch.randn(2, 4, 512, width, dtype=dtype) for _ in range(3))
    attention = BlockAttention(Fixed(block=block).text, None, None, scale=0.3, dropout_p=0.0, causal=True)
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
