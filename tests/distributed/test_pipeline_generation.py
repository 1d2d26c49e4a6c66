"""`PipelinedModel.generate` on gloo ranks against the unsplit model's `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from tests.distributed.test_tensor_parallel import _build

pytestmark = pytest.mark.distributed

COUNT, ROWS, LENGTH = 2, 2, 16
PROMPTS = torch.randint(1, 64, (3, 5), generator=torch.Generator().manual_seed(0))


def _pipeline(model: nn.Module, *, dp: int = 1, names: tuple[str, ...] = ("input_ids", "labels")) -> Any:
    like = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return dsgraph.parallelize(
        model, dp=dp, pp=2, microbatches=COUNT, example_kwargs=dict.fromkeys(names, like), zero_stage=3
    )


def _generated(dp: int, *calls: dict[str, Any]) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Return for each call the tokens of the stages, and those of the unsplit model."""
    piped, alone = _pipeline(_build("llama"), dp=dp), _build("llama").eval()
    ids = PROMPTS[:2, dist.get_rank() % dp :] if dp > 1 else PROMPTS  # each data-parallel rank has its own
    found = []
    for arguments in calls:
        tokens = []
        for model in (piped, alone):
            torch.manual_seed(1)
            tokens.append(model.generate(ids, pad_token_id=0, **arguments).tolist())
        found.append((tokens[0], tokens[1]))
    return found


@pytest.mark.parametrize(
    ("dp", "calls"),
    [
        (
            1,
            [
                {"max_new_tokens": 8, "do_sample": False},
                {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_k": 5},
            ],
        ),
        pytest.param(
            2,
            [
                {"max_new_tokens": 8, "num_beams": 2},
                {"max_length": 12, "eos_token_id": list(range(1, 64, 5))},  # ranks end after several numbers of tokens
            ],
            marks=pytest.mark.full,
        ),
    ],
)
def test_tokens_are_those_of_the_unsplit_model(ranks, dp, calls):
    for found in ranks(2 * dp).run(_generated, dp, *calls):
        assert [stages for stages, _ in found] == [alone for _, alone in found]


def _padded() -> None:
    names = ("input_ids", "attention_mask", "position_ids")
    piped, alone = _pipeline(_build("llama"), names=names), _build("llama").eval()
    mask = torch.ones_like(PROMPTS)
    mask[0, :2] = 0
    given = {"input_ids": PROMPTS, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(piped.generate(**given), alone.generate(**given))


def test_prompts_of_several_lengths_are_padded_on_the_left(ranks):
    ranks(2).run(_padded)


def _refusals() -> None:
    piped = _pipeline(_build("llama"))
    mask = torch.ones_like(PROMPTS)
    mask[0, 0] = 0
    cases: list[tuple[Tensor, dict[str, Any], str]] = [
        (PROMPTS, {"max_new_tokens": 12}, "max_new_tokens=12 exceed the length of the example, which is 16"),
        (PROMPTS, {"use_cache": True}, "use_cache is not supported across stages"),
        (PROMPTS.repeat(2, 1), {"max_new_tokens": 2}, "6 sequences of 5 tokens exceed the batch of the pipeline, 4"),
        (PROMPTS, {"max_new_tokens": 2, "attention_mask": mask}, "need the argument 'attention_mask'"),
        (PROMPTS, {"max_new_tokens": 2, "output_attentions": True, "return_dict_in_generate": True}, "logits alone"),
    ]
    for prompts, arguments, problem in cases:
        with pytest.raises(dsgraph.OptionError, match=rf"^pipeline\.generate: .*{problem}"):
            piped.generate(prompts, **arguments)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(dsgraph.RanksDisagreeError, match=r"draw different random numbers.*Sampling needs equal"):
        piped.generate(PROMPTS, max_new_tokens=2, do_sample=True)
    with pytest.raises(dsgraph.RanksDisagreeError, match="compute with different batches"):
        piped.generate(PROMPTS + dist.get_rank(), max_new_tokens=2)
    with pytest.raises(dsgraph.OptionError, match="cannot fill the argument 'token_type_ids'"):
        _pipeline(_build("gpt2"), names=("input_ids", "labels", "token_type_ids")).generate(PROMPTS)


def test_what_stages_cannot_generate_is_refused(ranks):
    ranks(2).run(_refusals)


def _both_ways() -> None:
    """A decoder of transformers that sees the tokens that follow."""
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.BertConfig(**sizes, intermediate_size=32, is_decoder=False)
    piped = _pipeline(tf.BertLMHeadModel(config))
    with pytest.raises(dsgraph.OptionError, match="logits depend on the tokens that follow"):
        piped.generate(PROMPTS, max_new_tokens=2, pad_token_id=0)


def test_a_model_that_is_not_causal_is_refused(ranks):
    ranks(2).run(_both_ways)
