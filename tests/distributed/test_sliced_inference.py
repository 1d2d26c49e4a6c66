"""Engines whose layers several ranks share generate what transformers generates in one process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.generation.streamers import BaseStreamer

import dsgraph
from dsgraph.utils.errors import InferenceError, RanksDisagreeError
from tests.inference.families import CONFIGS, encoder, encoder_decoder, model, prompt

pytestmark = pytest.mark.distributed

EAGER = {"codegen": "eager"}
WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
]


class _Collector(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append(-1)


def _generate(family: str, dtype: torch.dtype, lengths: tuple[int, ...], heads: int, ways: int = len(WAYS)) -> None:
    ranks = dist.get_world_size()
    plain = model(family, heads=heads).to(dtype)
    options = {"mp_size": ranks, "dtype": dtype, "max_tokens": 64, "options": EAGER}
    engine = dsgraph.init_inference(model(family, heads=heads), **options)
    said: set[int] = set()
    for way in WAYS[:ways]:
        for length in lengths:
            given = prompt(2, length, padded=2)
            torch.manual_seed(7)
            expected = plain.generate(**given, max_new_tokens=8, **way)
            torch.manual_seed(7)
            found = engine.generate(**given, max_new_tokens=8, **way)
            assert torch.equal(expected, found), (way, length)
            said.update(found[:, length:].flatten().tolist())
    assert len(said) > 3  # it says something
    warm = engine.report()
    assert warm.decode.compiles == (2 if ways == len(WAYS) else 1), "one for two rows, one for six"
    collector, given = _Collector(), prompt(2, lengths[0])
    found = engine.generate(**given, max_new_tokens=4, streamer=collector)
    new = found[:, lengths[0] :].T.flatten().tolist()
    assert collector.seen == [*given["input_ids"].flatten().tolist(), *new, -1]
    layers, rows, width = 2, 2, 8
    cached = getattr(plain.config, "num_key_value_heads", None) or plain.config.num_attention_heads
    full = layers * 2 * rows * cached * 64 * width * dtype.itemsize  # keys and values
    assert warm.cache_bytes[2] * ranks == full, "each rank holds its heads alone"


def test_two_ranks_generate_what_one_process_does(ranks):
    """Beams are rows of a batch to a rank: one process has them in tests/inference."""
    ranks(2).run(_generate, "llama", torch.float32, (3,), 2, ways=1)


@pytest.mark.full
@pytest.mark.parametrize("family", list(CONFIGS))
def test_two_ranks_generate_what_one_process_does_in_every_family(ranks, family):
    ranks(2).run(_generate, family, torch.float32, (3, 40), 2, timeout_s=200)


@pytest.mark.full
@pytest.mark.parametrize("family", list(CONFIGS))
def test_four_ranks_generate_what_one_process_does(ranks, family):
    ranks(4).run(_generate, family, torch.float32, (3, 40), 4, timeout_s=200)


# A model that was not trained says what it said before, unless that is forbidden.
_NEW = {"no_repeat_ngram_size": 1}


def _decode(lengths: tuple[int, ...], ways: list[dict[str, Any]]) -> None:
    plain = encoder_decoder()
    engine = dsgraph.init_inference(encoder_decoder(), mp_size=dist.get_world_size(), max_tokens=64, options=EAGER)
    for way in ways:
        for length in lengths:
            given = prompt(2, length, padded=2)
            torch.manual_seed(7)
            expected = plain.generate(**given, max_new_tokens=8, **_NEW, **way)
            torch.manual_seed(7)
            assert torch.equal(engine.generate(**given, max_new_tokens=8, **_NEW, **way), expected), (way, length)
    given = {**prompt(2, 9), "decoder_input_ids": prompt(2, 5)["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(engine(**given).logits, plain(**given).logits, atol=1e-4, rtol=1e-4)
    caches, layers, rows, heads, width = 2, 2, 2, 4, 8
    full = caches * layers * 2 * rows * heads * 64 * width * 4  # keys and values, float32
    assert engine.report().cache_bytes[2] * dist.get_world_size() == full, "each rank holds its heads alone"


@pytest.mark.full  # an encoder and a decoder alone precede; tests/inference/test_encoders.py has both in one process
def test_ranks_share_an_encoder_and_a_decoder(ranks):
    ranks(2).run(_decode, (3,), WAYS[:1])


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_an_encoder_and_a_decoder_in_all_ways(ranks, world):
    ranks(world).run(_decode, (40, 3, 11), WAYS, timeout_s=200)


def _encode(head: str, lengths: tuple[int, ...] = (3, 40)) -> None:
    plain = encoder(head)
    engine = dsgraph.init_inference(encoder(head), mp_size=dist.get_world_size(), max_tokens=64, options=EAGER)
    query = dict(engine.module.named_parameters())
    sliced = [name for name, param in query.items() if param.to_local().numel() < param.numel()]
    assert any("attention.self.query" in name for name in sliced), sliced
    for length in lengths:
        given = prompt(2, length)
        given["attention_mask"][1, length - 2 :] = 0
        with torch.no_grad():
            expected, found = plain(**given), engine(**given)
        assert list(found.keys()) == list(expected.keys())
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.full  # a decoder precedes; tests/inference/test_encoders.py has one process
def test_ranks_share_an_encoder(ranks):
    ranks(2).run(_encode, "BertForMaskedLM", (3,))


@pytest.mark.full
@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertModel"])
def test_ranks_share_an_encoder_for_texts_of_any_length(ranks, head):
    ranks(2).run(_encode, head)


@pytest.mark.full
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForQuestionAnswering"])
def test_four_ranks_share_an_encoder(ranks, head):
    ranks(4).run(_encode, head)


def _made(family: str) -> Any:
    return encoder("BertForMaskedLM") if family == "bert" else encoder_decoder() if family == "t5" else model(family)


def _logits(family: str, dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "max_tokens": 32, "options": EAGER}
    engine = dsgraph.init_inference(_made(family), mp_size=2, **options)
    given = prompt(2, 9)
    if family == "t5":
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        exact = _made(family)(**given).logits
        found = engine(**given).logits.float()
        whole = _made(family).to(dtype)(**given).logits.float()
    # Sums over ranks are rounded in another order, so that one process is no nearer to float32 than ranks are.
    assert (found - exact).norm() <= 1.25 * (whole - exact).norm()
    if family not in ("bert", "t5"):
        tokens = engine.generate(**given, max_new_tokens=8, do_sample=False)
        assert tokens.shape == (2, 17)  # the engine compares those of ranks


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*CONFIGS, "bert", "t5"])
def test_16_bits_on_two_ranks_are_as_near_as_one_process(ranks, family, dtype):
    ranks(2).run(_logits, family, dtype, timeout_s=200)


def _many_words() -> None:
    words = 8448  # above 8,192 the plan slices the table and the last layer
    engine = dsgraph.init_inference(model("llama", words=words), mp_size=2, max_tokens=32, options=EAGER)
    held = dict(engine.module.named_parameters())["lm_head.weight"].to_local().shape
    assert held == (words // 2, 32), held
    given = prompt(2, 6)
    expected = model("llama", words=words).generate(**given, max_new_tokens=6, do_sample=False)
    assert torch.equal(engine.generate(**given, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.full
def test_a_sliced_vocabulary(ranks):
    ranks(2).run(_many_words, timeout_s=200)


def _overlapping() -> None:
    plain, way = model("llama"), {"max_new_tokens": 4, "do_sample": False}
    engine = dsgraph.init_inference(model("llama"), mp_size=2, max_tokens=32, options=EAGER)
    prompts = [prompt(1, 5), prompt(1, 7)]
    expected = [plain.generate(**given, **way) for given in prompts]
    found: dict[int, Any] = {}

    def call(index: int) -> None:
        try:
            found[index] = torch.equal(engine.generate(**prompts[index], **way), expected[index])
        except RanksDisagreeError:
            found[index] = "refused"

    for order in ((0, 1), (0, 1) if dist.get_rank() == 0 else (1, 0)):
        threads = [threading.Thread(target=call, args=(index,)) for index in order]
        for thread in threads:
            thread.start()
            time.sleep(0.3)  # whoever comes first is served first
        for thread in threads:
            thread.join()
        assert all(each is True or each == "refused" for each in found.values()), found
    assert len(found) == 2
    engine.generate(**prompts[0], **way)


def test_threads_of_ranks_are_ordered_alike_or_refused(ranks):
    ranks(2).run(_overlapping)


def _refused() -> None:
    with pytest.raises(InferenceError, match="mp_size is 4, and there are 2 ranks"):
        dsgraph.init_inference(model("gpt2"), mp_size=4)
    with pytest.raises(InferenceError, match="num_key_value_heads of LlamaForCausalLM is 1"):
        dsgraph.init_inference(model("llama", heads=1), mp_size=2)
    engine = dsgraph.init_inference(model("llama"), mp_size=2, max_tokens=32, options=EAGER)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RanksDisagreeError, match="random state"):
        engine.generate(**prompt(1, 4), max_new_tokens=2, do_sample=True)
    with pytest.raises(InferenceError, match="guidance_scale or use_cache=False, cannot be computed where ranks share"):
        engine.generate(**prompt(1, 4), max_new_tokens=2, do_sample=False, guidance_scale=1.5)


def test_what_ranks_cannot_share_is_refused(ranks):
    ranks(2).run(_refused)
