"""The inference engine against transformers' own `generate`, on the same device."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch

import dsgraph
from tests.gpu.device import ON_CUDA, error_of, synchronize

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.inductor, pytest.mark.slow, pytest.mark.usefixtures("one_rank")]

SIZES = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
PROMPT, NEW = 24, 16
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-5),
    "fp32, eager": ({"options": {"codegen": "eager"}}, 1e-5),
    "kernels": ({"options": {"kernels": ["skinny_linear", "decode_attention", "rms_norm", "rope"]}}, 1e-5),
    "bf16": ({"dtype": torch.bfloat16}, 2e-2),
    "int8": ({"quantize": "int8"}, 3e-2),
    "int4": ({"quantize": "int4"}, 4e-1),
    "int8, bf16": ({"quantize": "int8", "dtype": torch.bfloat16}, 3e-2),
}
"""Arguments of `init_inference`, and the largest error of the logits. Up to 1e-5 the tokens must be transformers'."""


def build() -> Any:
    """Build a Llama of random weights, large enough that the most probable token is clearly ahead."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case, device, record):
    how, largest = CASES[case]
    model = build().to(device)
    ids = torch.randint(0, SIZES["vocab_size"], (2, PROMPT), device=device)
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    own = copy.deepcopy(model).to(how.get("dtype", torch.float32))
    engine = dsgraph.init_inference(copy.deepcopy(model), max_tokens=64, **how)
    got, expected = engine.generate(ids, **greedy), own.generate(ids, **greedy)
    same = float((got[:, PROMPT:] == expected[:, PROMPT:]).float().mean())
    with torch.no_grad():
        logits, truth = engine(ids).logits.float(), own(ids).logits.float()
    error = error_of(logits, truth)
    record(same=same, logits_error=error)
    for name, run in (("ours", engine.generate), ("transformers", own.generate)):
        started = time.perf_counter()
        run(ids, **greedy)
        synchronize()
        record(**{f"{name}_ms_a_token": 1e3 * (time.perf_counter() - started) / NEW})
    assert error <= largest
    assert same == 1 or largest > 1e-5, (got[:, PROMPT:].tolist(), expected[:, PROMPT:].tolist())
    assert ON_CUDA or got.device.type == "cpu"
