"""`generate()` of a transformers model whose ranks need different numbers of tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsgraph

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _generate(synced: bool | None, stage: int = 3) -> tuple[list[int], list[int]]:
    """Tokens of one process alone and of the partitioned model; each rank wants another number of them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=60)
    model: Any = GPT2LMHeadModel(config).eval()
    alone = copy.deepcopy(model)
    dsgraph.partition(model, stage=stage, keep_whole_below=0)
    rank = dist.get_rank()
    prompt = {"input_ids": torch.tensor([[1, 2 + rank]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    wanted: dict[str, Any] = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "pad_token_id": 0}
    expected = alone.generate(**prompt, **wanted)
    return expected.tolist(), model.generate(**prompt, **wanted, synced_gpus=synced).tolist()


@pytest.mark.full  # waits for a time-out; test_eager_agreement.py has ranks that part
def test_without_synced_gpus_it_fails_and_says_so(ranks):
    with pytest.raises(AssertionError) as caught:
        ranks(2).run(_generate, False, timeout_s=4)
    said = str(caught.value)
    assert "RanksDisagreeError: rank 1 gathers parameter 'transformer.wte.weight'" in said
    assert "call model.generate(..., synced_gpus=True)" in said


def test_with_synced_gpus_it_gives_the_tokens_of_one_process(ranks):
    for expected, got in ranks(2).run(_generate, True):
        assert got == expected


@pytest.mark.parametrize("stage", (1, 3))
def test_synced_gpus_is_on_by_default(ranks, stage):
    for expected, got in ranks(2).run(_generate, None, stage):
        assert got == expected
