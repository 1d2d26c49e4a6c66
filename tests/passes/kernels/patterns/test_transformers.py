"""Every norm, rotary embedding and gated MLP of real models is found, and the models train as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import dsgraph
from dsgraph.passes import PassContext, Phase, Pipeline, Runner
from dsgraph.passes.ir.graph import all_graph_modules
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from examples.gpt import GPT, GPTConfig

VOCAB, LAYERS = 64, 2
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _causal(name: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(DECODER | sizes))
    return getattr(transformers, f"{name}ForCausalLM")(config)


# A norm before the attention and one after it, one at the end; all but the first are of a sum with a residual.
# Queries and keys are rotated; one head.
USUAL = {"rms_norm": 1, "add_rms_norm": 2 * LAYERS, "rope": 2 * LAYERS, "linear_cross_entropy": 1}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "llama": (lambda: _causal("Llama"), USUAL | {"swiglu": LAYERS}),
    "qwen3": (lambda: _causal("Qwen3", head_dim=8), USUAL | {"rms_norm": 2 * LAYERS + 1, "swiglu": LAYERS}),
    "gemma": (lambda: _causal("Gemma", head_dim=8, pad_token_id=0), USUAL | {"geglu": LAYERS}),
    "gemma2": (
        lambda: _causal("Gemma2", head_dim=8, pad_token_id=0),
        USUAL | {"rms_norm": 2 * LAYERS + 1, "geglu": LAYERS},
    ),
    "mistral": (lambda: _causal("Mistral", head_dim=8), USUAL | {"swiglu": LAYERS}),
    "cohere": (
        lambda: _causal("Cohere", pad_token_id=0),  # attention and MLP side by side, after one norm
        {"layer_norm": 1, "add_layer_norm": LAYERS, "rope": 2 * LAYERS, "swiglu": LAYERS, "linear_cross_entropy": 1},
    ),
    "examples.gpt": (lambda: GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, layers=LAYERS)), USUAL),
}


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=LAYERS,
        n_head=2,
        n_positions=16,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    )
    return transformers.GPT2Model(config)


def _mean(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).last_hidden_state.sin().mean()


class _Count:
    """A backend that substitutes every kernel, counts them and runs the graph as it is."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.notes: list[str] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        runner = Runner(Pipeline([SubstituteKernels(KERNELS, asked=tuple(spec.name for spec in KERNELS))]))
        runner.run(gm, PassContext(Phase.CAPTURE))
        self.notes.extend(runner.records[-1].notes)
        for module in all_graph_modules(gm):
            for node in module.graph.nodes:
                self.found.update(spec.name for spec in KERNELS if node.target is spec.op)
        return gm


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    if isinstance(model, GPT):
        return model(tokens, tokens)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


# Between them they have every kernel of the others.
_SMALL_TIER = ("llama", "gemma2", "cohere", "examples.gpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _SMALL_TIER else pytest.mark.full) for name in MODELS]
)
def test_all_there_is_is_substituted_and_trains_the_same(name):
    build, expected = MODELS[name]
    torch.manual_seed(0)
    model = build()
    tokens = torch.randint(1, VOCAB, (2, 8))
    plain = _loss(model, tokens)
    gradients = torch.autograd.grad(plain, list(model.parameters()))

    torch._dynamo.reset()
    counters.clear()
    count = _Count()
    loss = torch.compile(lambda tokens: _loss(model, tokens), backend=count)(tokens)
    assert not counters["graph_break"]
    assert dict(count.found) == expected, count.notes
    near_misses = [note for note in count.notes if "is not substituted" in note and "calls torch's" not in note]
    assert near_misses == []
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "compute", "norm"),
    [pytest.param(MODELS["llama"][0], _loss, "rms_norm", marks=pytest.mark.full), (_gpt2, _mean, "layer_norm")],
)
def test_norms_of_sums_train_the_same_behind_the_backend(build, compute, norm):
    torch.manual_seed(0)
    model = build()
    tokens = torch.randint(1, VOCAB, (2, 8))
    plain = compute(model, tokens)
    gradients = torch.autograd.grad(plain, list(model.parameters()))

    torch._dynamo.reset()
    options = {"codegen": "eager", "kernels": [norm, f"add_{norm}"], "strict": True}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    loss = compute(compiled, tokens)
    report = str(dsgraph.report(compiled))
    assert f"add_{norm} in {2 * LAYERS} places" in report and f" {norm} in 1 place" in report
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), gradients, rtol=1e-5, atol=1e-5)
