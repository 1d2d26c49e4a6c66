"""SparsifyAttention on real models and on what it must leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import dsgraph
from dsgraph.passes import PassContext, PassError, Phase, Pipeline, Runner
from dsgraph.passes.ir.graph import all_graph_modules
from dsgraph.passes.kernels.sparsify_attention import SparsifyAttention
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from dsgraph.sparse import BSLongformer, Dense, Fixed, LocalSlidingWindow, from_block_mask

pytestmark = pytest.mark.slow

LENGTH, HEADS = 24, 4
LAYOUT = Fixed(block=4, num_local_blocks=2)
OP = torch.ops.dsgraph.block_sparse_attention.default
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "Bert": SIZES | NO_DROPOUT,
    "Roberta": SIZES | NO_DROPOUT,
    "GPT2": {
        **{"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": HEADS, "n_positions": 64},
        **{"bos_token_id": 0, "eos_token_id": 0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    },
    "Llama": SIZES | {"num_key_value_heads": 2},
    "Qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 4},
}
CAUSAL = ("GPT2", "Llama", "Qwen3")


class _Sparsify:
    """A backend that runs the pass alone, and the graph as it is then."""

    def __init__(self, layout=LAYOUT):
        self.layout, self.calls, self.notes = layout, [], []

    def __call__(self, gm, inputs):
        runner = Runner(Pipeline([SparsifyAttention(self.layout)]))
        runner.run(gm, PassContext(Phase.CAPTURE))
        self.notes += runner.records[-1].notes
        for module in all_graph_modules(gm):
            self.calls += [node for node in module.graph.nodes if node.target is OP]
            self.dense = [node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention]
        return gm


def _model(name, spelling):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    config._attn_implementation = spelling
    config.use_cache = False
    return getattr(transformers, f"{name}Model")(config)


def _loss(hidden, given):
    counted = given["attention_mask"] if "attention_mask" in given else torch.ones(hidden.shape[:2])
    return (hidden * counted[..., None]).sin().mean()


def _dense_twin(name, monkeypatch, given):
    """Loss and gradients of the model with torch's function and the layout as a mask of all scores."""
    model = _model(name, "sdpa")
    kept = LAYOUT.codes(HEADS, LENGTH, causal=name in CAUSAL).tokens(LENGTH)[None]
    if "attention_mask" in given:
        kept = kept & given["attention_mask"].bool()[:, None, None]
    plain = F.scaled_dot_product_attention

    def masked(q, k, v, scale=None, **_):
        k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
        return plain(q, k, v, attn_mask=kept, scale=scale)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", masked)
        loss = _loss(model(**given).last_hidden_state, given)
    return loss, _gradients(loss, model)


def _gradients(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [grad for grad in found if grad is not None]


@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spelling", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_a_mask_of_all_scores_gives(name, spelling, padded, monkeypatch):
    given = {"input_ids": torch.randint(2, 32, (2, LENGTH))}
    if padded:
        given["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])).long()
    expected, gradients = _dense_twin(name, monkeypatch, given)
    model, backend = _model(name, spelling), _Sparsify()
    torch._dynamo.reset()
    loss = _loss(torch.compile(model, backend=backend)(**given).last_hidden_state, given)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(_gradients(loss, model), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(backend.calls) == 2
    assert not backend.dense
    for call in backend.calls:
        _, k, _, mask, bias, text = call.args
        assert call.kwargs["causal"] == (name in CAUSAL)
        assert bias is None
        assert (mask is not None) == padded
        assert not padded or list(mask.meta["example_value"].shape) == [2, 1, 1, LENGTH]  # no mask of all scores
        assert text == LAYOUT.text
    if name in ("Llama", "Qwen3"):
        assert k.meta["example_value"].shape[1] == 2  # heads of keys are read once


def _run(function, *inputs, layout=LAYOUT):
    backend = _Sparsify(layout)
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)(*inputs), backend


def _heads(length=16, dims=4):
    return [torch.randn(2, HEADS, length, 8)[(0,) * (4 - dims)] for _ in range(3)]


def test_masks_and_biases_of_all_scores_are_kept():
    q, k, v = _heads()
    mask, bias = torch.rand(1, 1, 16, 16) > 0.3, torch.randn(1, HEADS, 16, 16, requires_grad=True)

    def attend(q, k, v, mask, bias):
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = (q @ k.transpose(-2, -1) * 0.3).masked_fill(mask, float("-inf")).softmax(-1) @ v
        return masked + hidden + F.scaled_dot_product_attention(q, k, v, bias)

    made, backend = _run(attend, q, k, v, mask, bias)
    assert len(backend.calls) == 3
    kept = LAYOUT.codes(HEADS, 16).tokens(16)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask & kept)
    expected = expected + F.scaled_dot_product_attention(q, k, v, attn_mask=~mask & kept, scale=0.3)
    expected = expected + F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~kept, -1e30))
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    (mine,) = torch.autograd.grad(made.sin().sum(), bias)
    (theirs,) = torch.autograd.grad(expected.sin().sum(), bias)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_causal_mask_of_ones_below_the_diagonal_is_no_mask():
    def attend(q, k, v):
        hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
        return (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    _, backend = _run(attend, *_heads(), layout=LocalSlidingWindow(block=4))
    assert backend.calls[0].args[3] is None
    assert backend.calls[0].kwargs["causal"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :5], k, v), "it has 5 queries and 16 keys"),
        (lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]), "it has 3 dimensions"),
        (
            lambda q, k, v: ((p := (q @ k.transpose(-2, -1)).softmax(-1)) @ v, p),
            "is read by output as well",
        ),
    ],
)
def test_what_is_left_dense_is_named(function, said):
    inputs = _heads()
    made, backend = _run(function, *inputs)
    assert not backend.calls
    assert any("attention stays dense" in note and said in note for note in backend.notes)
    assert backend.notes[-1].startswith("sparse_attention was requested, but")
    torch.testing.assert_close(made, function(*inputs))


@pytest.mark.parametrize("differ", [True, False])
def test_heads_that_are_split_over_ranks_have_one_layout(differ):
    def split(gm, inputs):
        first = next(iter(gm.graph.nodes))
        with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
            gm.graph.call_function(torch.ops.dsgraph.enter_slices.default, (first, "ranks"))
        result = SparsifyAttention(Fixed(block=4, different_layout_per_head=differ)).run(gm, PassContext(Phase.CAPTURE))
        found.append((result.changed, " ".join(result.notes)))
        return lambda *args: args[:1]

    found: list[tuple[int, str]] = []
    torch._dynamo.reset()
    torch.compile(F.scaled_dot_product_attention, backend=split)(*_heads())
    ((changed, notes),) = found
    assert changed == (0 if differ else 1)
    assert ("tensor-parallel ranks have different heads" in notes) is differ


def test_a_layout_of_another_length_is_no_error():
    layout = from_block_mask(torch.ones(2, 2, dtype=torch.bool), block=4)
    _, backend = _run(F.scaled_dot_product_attention, *_heads(), layout=layout)
    assert "the layout was made for 8 tokens, and there are 16" in backend.notes[0]


def test_it_runs_before_kernels_that_would_take_its_place():
    with pytest.raises(PassError, match="sparsify_attention must run before substitute_kernels"):
        Pipeline([SubstituteKernels(), SparsifyAttention()])
    assert SparsifyAttention(Fixed()).fingerprint() != SparsifyAttention(Dense()).fingerprint()


@pytest.mark.parametrize("layout", [pytest.param(LAYOUT, marks=pytest.mark.full), {"mode": "bslongformer", "block": 4}])
def test_the_option_adds_the_pass(layout):
    torch._dynamo.reset()
    model = torch.compile(
        _model("Bert", "sdpa"), backend="dsgraph", options={"codegen": "eager", "sparse_attention": layout}
    )
    model(input_ids=torch.randint(2, 32, (2, LENGTH))).last_hidden_state.sum().backward()
    said = str(dsgraph.report(model))
    mode = "fixed" if layout is LAYOUT else "bslongformer"
    assert f"2 attentions in blocks of 4 of mode {mode}" in said


def test_strict_wants_an_attention():
    torch._dynamo.reset()
    options = {"codegen": "eager", "sparse_attention": LAYOUT, "strict": True}
    with pytest.raises(Exception, match="sparse_attention was requested, but is not used in this graph"):
        torch.compile(torch.nn.Linear(4, 4), backend="dsgraph", options=options)(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fixed", "it takes a layout of dsgraph.sparse"),
        ({"mode": "fixt"}, "mode is 'fixt'"),
        ({"block": -1}, "block is -1; it takes 1 or more"),
    ],
)
def test_wrong_values_of_the_option_are_refused(given, said):
    with pytest.raises(dsgraph.OptionError, match=said):
        dsgraph.compile(torch.nn.Linear(4, 4), sparse_attention=given)
    with pytest.raises(dsgraph.OptionError, match="remove one of the two"):
        dsgraph.compile(torch.nn.Linear(4, 4), sparse_attention=BSLongformer(), pipeline=[SparsifyAttention(LAYOUT)])
