"""Cross-attention is distinguished from self-attention by the source of queries and keys, not by their lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from dsgraph.sparse import LocalSlidingWindow
from tests.passes.kernels.test_sparsify_attention import _Sparsify

LENGTH, WIDTH, HEADS = 16, 32, 4
LAYOUT = LocalSlidingWindow(block=4, attention="bidirectional")
SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"d_model": WIDTH, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS},
}


def _run(model, *args, **kwargs):
    torch._dynamo.reset()
    backend = _Sparsify(LAYOUT)
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    return len(backend.calls), [note for note in backend.notes if "stays dense" in note]


class Attention(nn.Module):
    """Attention over what `read` gives of one or two sequences: the tokens of queries, and those of keys."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.q, self.k, self.v, self.encoder = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.low, self.high = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, *inputs):
        asking, answering = self.read(self, *inputs)
        heads = (t.view(t.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.project(asking, answering))
        return functional.scaled_dot_product_attention(*heads)

    def project(self, asking: Tensor, answering: Tensor) -> tuple[Tensor, ...]:
        return self.q(asking), self.k(answering), self.v(answering)


def _written_out(x):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


SELF = {
    "the same tokens": lambda _, x: (x, x),
    "two norms": lambda m, x: (m.norm(x), m.other(x)),
    "a norm written out": lambda m, x: (_written_out(x), m.norm(x)),
    "positions added twice": lambda _, x: (x + x.new_ones(WIDTH), x + x.new_ones(WIDTH)),
    "keys of low rank": lambda m, x: (x, _written_out(m.low(x)) @ m.high.weight.T),
}
CROSS = {
    "two inputs": lambda _, x, y: (x, y),
    "two inputs with one norm": lambda m, x, y: (m.norm(x), m.norm(y)),
    "an encoder of the same input": lambda m, x, _: (x, functional.gelu(m.encoder(x))),
    "two halves of one tensor": lambda _, x, _y: (x[:, : LENGTH // 2], x[:, LENGTH // 2 :]),
    "a residual stream that has read it": lambda m, x, y: (x + m.encoder(y), y),
}


@pytest.mark.parametrize("read", SELF.values(), ids=list(SELF))
def test_self_attention_is_made_sparse(read):
    model = Attention(read)
    if "low" in read.__code__.co_names:
        model.project = lambda asking, answering: (model.q(asking), answering, answering)
    assert _run(model, torch.randn(2, LENGTH, WIDTH)) == (1, [])


@pytest.mark.parametrize("read", CROSS.values(), ids=list(CROSS))
def test_cross_attention_stays_dense_and_is_named(read):
    made, notes = _run(Attention(read), torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH))
    assert made == 0
    assert len(notes) == 1
    assert "its queries come from" in notes[0]
    assert "as in cross-attention" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, pytest.param(True, marks=pytest.mark.full)])
def test_of_an_encoder_and_a_decoder_each_attends_to_itself_alone(same):
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES)).eval()
    source, target = torch.randint(3, 96, (2, 2, LENGTH))
    made, notes = _run(model, input_ids=source, decoder_input_ids=source if same else target)
    assert made == 2
    assert len(notes) == 1


def test_of_an_attention_without_projections_values_tell_whether_it_is_of_two_sequences():
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, 8)
    assert _run(functional.scaled_dot_product_attention, q, k, v) == (1, [])
    made, notes = _run(lambda x, memory: functional.scaled_dot_product_attention(x, memory, memory), q, k)
    assert (made, len(notes)) == (0, 1)


def test_a_module_of_torch_that_is_one_call_is_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x, memory):
            return self.attention(x, memory, memory, need_weights=False)[0]

    made, notes = _run(Model(), torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH))
    assert made == 0
    assert len(notes) == 1
    assert "nn.MultiheadAttention" in notes[0]
