"""Captured forwards of unmodified models, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsgraph.parallel.pipeline.captured_model import CapturedModel, capture_model
from dsgraph.utils.errors import PartitionError

CPU = torch.device("cpu")
IDS = torch.ones(2, 8, dtype=torch.long)


def _family(name: str) -> nn.Module:
    import transformers as tf

    common: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_experts_per_tok": 1,
        "output_router_logits": True,
    }
    if name == "gpt2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    if name == "mixtral":
        return tf.MixtralForCausalLM(tf.MixtralConfig(**common, **experts, num_local_experts=2))
    config = tf.Qwen3MoeConfig(**common, **experts, moe_intermediate_size=8, num_experts=2, head_dim=8)
    return tf.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", pytest.param("qwen3-moe", marks=pytest.mark.full)])
def test_forwards_that_log_or_collect_router_logits_are_captured(name):
    if name != "gpt2" and tuple(map(int, version("transformers").split(".")[:2])) < (5, 24):
        pytest.skip("its loss counts experts by an op whose result may have any size")
    model = _family(name)
    captured = capture_model(model, (), kwargs={"input_ids": IDS, "labels": IDS}, device=CPU)
    (loss, *_) = (node for node in captured.results if node.meta["val"].ndim == 0)
    assert loss.meta["val"].requires_grad
    trained = {name for name, value in captured.state.values() if isinstance(value, nn.Parameter)}
    assert trained == {name for name, _ in model.named_parameters()}


class _Masks(nn.Module):
    """Values of inputs and a small buffer, some of which may not be computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("places", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angles = torch.cos(x * self.places)
        seeded, noise = torch.rand_like(x), torch.poisson(x)
        written = torch.zeros_like(x)
        written[0] = 1
        return self.layer(x) * angles * seeded * noise * written


def test_what_every_rank_can_compute_is_neither_random_nor_written_to():
    captured = capture_model(_Masks(), (torch.ones(2, 4),), kwargs={}, device=CPU)
    repeated = {node.name for node in captured.repeated}
    assert {"angles", "seeded"} <= repeated and captured.draws
    assert not repeated & {"noise", "written", "linear"}


class _Returns(nn.Module):
    """Returns what a function makes of itself, its argument and its result."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self._make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Any:
        return self._make(self, x, self.linear(x))


@dataclass
class _Own:
    logits: Tensor


def _captured(make: Callable[..., Any]) -> CapturedModel:
    return capture_model(_Returns(make), (torch.ones(2, 4),), kwargs={}, device=CPU)


def test_results_and_arguments_are_told_apart():
    captured = _captured(lambda model, x, y: {"x": x, "twice": [y, y.sum(), y], "classes": 4, "device": x.device})
    tree = captured.output
    numbers = {number: torch.tensor(float(number)) for number in range(3)}
    found = tree.filled(numbers, {0: torch.ones(2)})
    first, total, again = found["twice"]
    assert first is again and len(captured.returned()) == 2
    assert [captured.results[int(value)].meta["val"].ndim for value in (first, total)] == [2, 0]
    assert torch.equal(found["x"], torch.ones(2)) and found["classes"] == 4 and found["device"] is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda model, x, y: _Own(y), "it is a _Own, in which no tensor is found: return a tuple"),
        (lambda model, x, y: (y, model.linear.weight), "neither computed nor an argument"),
    ],
)
def test_what_cannot_be_returned_is_refused(make, problem):
    captured = _captured(make)
    with pytest.raises(PartitionError, match=problem):
        captured.returned()
