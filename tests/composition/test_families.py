"""Families of transformers that no document names: tensor slices and stages in bfloat16 against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsgraph

transformers = pytest.importorskip("transformers", minversion="5.20")

pytestmark = [pytest.mark.distributed, pytest.mark.full]

COUNT, ROWS, TIME, VOCAB, STEPS = 2, 2, 16, 64, 3
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
XGLM: dict[str, Any] = {
    **{"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 64, "num_layers": 4, "attention_heads": 4, "use_cache": False},
    **{"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "attn_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("apertus", "arcee", "ernie4_5", "exaone4", "helium", "hunyuan_v1_dense"), SIZES),
    **dict.fromkeys(("nemotron", "persimmon", "seed_oss"), SIZES),
    **{"gpt_oss": SIZES | EXPERTS, "olmo3": SIZES | {"sliding_window": 8}, "xglm": XGLM},
}
REFUSED = {"xglm": "buffer 'model.embed_positions.weights' is torch.float32"}


def _model(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config)


def _tokens(step: int) -> Tensor:
    return torch.randint(3, VOCAB, (COUNT * ROWS, TIME), generator=torch.Generator().manual_seed(step))


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def _alone(family: str, dtype: torch.dtype) -> list[float]:
    """Return the losses of one process, which computes in `dtype` and updates float32 parameters."""
    model = _model(family)
    computing, optimizer, losses = copy.deepcopy(model), _optimizer(model.parameters()), []
    pairs = list(zip(computing.parameters(), model.parameters(), strict=True))
    for step in range(STEPS):
        for low, param in pairs:
            low.data = param.data.to(dtype, copy=True)
        losses.append(0.0)
        for rows in _tokens(step).chunk(COUNT):
            loss = computing(input_ids=rows, labels=rows).loss / COUNT
            loss.backward()
            losses[-1] += float(loss)
            for low, param in pairs:
                if low.grad is not None:
                    param.grad = low.grad.float() if param.grad is None else param.grad + low.grad.float()
                low.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _on_ranks(family: str, dtype: torch.dtype) -> list[float] | str:
    rows = _tokens(0)[:ROWS]
    try:
        parts = dsgraph.parallelize(
            _model(family),
            **{"tp": 2, "pp": 2, "microbatches": COUNT, "example_kwargs": {"input_ids": rows, "labels": rows}},
            param_dtype=dtype,
        )
    except dsgraph.PartitionError as error:
        return str(error)
    optimizer, losses = _optimizer(parts.parameters()), []
    for step in range(STEPS):
        losses.append(float(parts.step(input_ids=_tokens(step), labels=_tokens(step))))
        optimizer.step()
        parts.zero_grad()
    return losses


@pytest.mark.parametrize("family", list(FAMILIES))
def test_losses_are_those_of_one_process_or_the_family_is_refused(ranks, family):
    found = ranks(4).run(_on_ranks, family, torch.bfloat16)
    if family in REFUSED:
        assert all(REFUSED[family] in error for error in found)
        return
    (expected,) = ranks(1).run(_alone, family, torch.bfloat16)
    for losses in found:
        assert losses == pytest.approx(expected, rel=3e-2)
