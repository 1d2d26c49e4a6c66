"""An engine generates what transformers generates, token for token, and compiles nothing after its warm-up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dsgraph
from dsgraph.utils.errors import InferenceError
from tests.inference.families import CONFIGS, model, prompt

pytestmark = pytest.mark.slow

EAGER = {"codegen": "eager"}


@pytest.fixture(scope="module")
def llama():
    """A model and its engine, for tests that do not count compiles."""
    plain = model("llama")
    return plain, dsgraph.init_inference(plain, max_tokens=64, options=EAGER)


def _both(plain, engine, given, **arguments):
    torch.manual_seed(7)
    expected = plain.generate(**given, **arguments)
    torch.manual_seed(7)
    return expected, engine.generate(**given, **arguments)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "llama" else pytest.mark.full) for name in CONFIGS]
)
def test_greedy_and_sampled_tokens_are_those_of_transformers(family):
    plain = model(family)
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    for length in (3, 40):
        for sampled in (False, True):
            given = prompt(2, length, padded=2)
            expected, found = _both(plain, engine, given, max_new_tokens=12, do_sample=sampled)
            assert torch.equal(expected, found), (length, sampled)
            assert len(set(found[:, length:].flatten().tolist())) > 3  # it says something


def test_nothing_is_compiled_after_one_prompt_of_each_bucket():
    engine = dsgraph.init_inference(model("llama"), max_tokens=64, options=EAGER)
    for length in (4, 40):
        engine.generate(**prompt(1, length), max_new_tokens=3)
    warm = engine.report()
    assert (warm.prompt.compiles, warm.decode.compiles, warm.buckets) == (2, 1, (32, 64))
    for length in (1, 17, 32, 33, 50):
        engine.generate(**prompt(1, length), max_new_tokens=4)
    after = engine.report()
    assert (after.prompt.compiles, after.decode.compiles) == (2, 1)
    assert after.decode.calls == 2 * 2 + 5 * 3
    assert after.decode.tokens_per_second > 0
    assert "decode: 1 compiled" in str(after)


@pytest.mark.full  # test_encoders.py has beams
def test_beams_are_those_of_transformers():
    plain = model("llama")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    expected, found = _both(plain, engine, prompt(2, 9), max_new_tokens=10, num_beams=3, num_return_sequences=2)
    assert torch.equal(expected, found)
    assert engine.report().decode.compiles == 1


def test_logits_are_those_of_the_model_and_the_models_forward_is_its_own():
    plain = model("gpt2")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    given = prompt(2, 21)
    torch.testing.assert_close(engine(**given).logits, plain(**given).logits)
    assert "forward" not in vars(plain)


def test_a_streamer_gets_each_token(llama):
    from transformers.generation.streamers import BaseStreamer

    class Collector(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    _, engine = llama
    collector = Collector()
    found = engine.generate(**prompt(1, 5), max_new_tokens=6, streamer=collector)
    assert collector.seen == [*found[0].tolist(), "end"]


def test_threads_get_their_own_tokens_and_compile_nothing():
    plain = model("llama")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    way = {"max_new_tokens": 8, "do_sample": False}
    prompts = [prompt(1, length) for length in range(5, 13)]
    expected = [plain.generate(**given, **way) for given in prompts]
    engine.generate(**prompts[0], **way)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda given: engine.generate(**given, **way), prompts))
    assert all(map(torch.equal, found, expected))
    assert (engine.report().prompt.compiles, engine.report().decode.compiles) == (1, 1)


def test_a_request_that_comes_while_another_one_streams_waits_for_nothing(llama):
    from transformers.generation.streamers import BaseStreamer

    plain, engine = llama
    first, second, way = prompt(1, 9), prompt(1, 7), {"max_new_tokens": 8, "do_sample": False}
    is_streaming, is_done = threading.Event(), threading.Event()

    class Slow(BaseStreamer):
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 4:
                is_streaming.set()
                assert is_done.wait(120)

        def end(self):
            pass

    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(engine.generate, **first, **way, streamer=Slow())
        assert is_streaming.wait(120)
        assert torch.equal(engine.generate(**second, **way), plain.generate(**second, **way))
        is_done.set()
        assert torch.equal(streamed.result(), plain.generate(**first, **way))


@pytest.mark.parametrize("arguments", [{"guidance_scale": 1.5}, {"use_cache": False}])
def test_forwards_that_no_graph_takes_are_the_models_own(arguments):
    plain = model("llama")
    engine = dsgraph.init_inference(plain, max_tokens=64, options=EAGER)
    expected, found = _both(plain, engine, prompt(2, 9, padded=2), max_new_tokens=8, do_sample=False, **arguments)
    assert torch.equal(expected, found)
    assert engine.report().uncompiled.calls == 8
    assert engine.report().decode.compiles <= 1
    assert "uncompiled: 8 calls of the model itself" in str(engine.report())


@pytest.mark.full  # test_encoders.py reads such a folder, test_checkpoints.py a wrong one
def test_a_folder_of_transformers_is_a_checkpoint(tmp_path):
    source = model("llama", seed=1)
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = dsgraph.init_inference(model("llama"), checkpoint=tmp_path, max_tokens=32, options=EAGER)
    given = prompt(1, 6)
    assert torch.equal(engine.generate(**given, max_new_tokens=8), source.generate(**given, max_new_tokens=8))


def test_bfloat16_generates_what_transformers_does():
    plain = model("llama").to(torch.bfloat16)
    config = {"dtype": "bf16", "max_out_tokens": 32}  # as DeepSpeed takes it
    engine = dsgraph.init_inference(model("llama"), config, options=EAGER)
    assert engine.max_tokens == 32
    given = prompt(1, 6)
    assert torch.equal(*_both(plain, engine, given, max_new_tokens=8, do_sample=False))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", CONFIGS)
def test_16_bits_are_as_near_to_float32_as_transformers(family, dtype):
    given = prompt(2, 9)
    with torch.no_grad():
        exact, whole = model(family)(**given).logits, model(family).to(dtype)(**given).logits.float()
    engine = dsgraph.init_inference(model(family), dtype=dtype, max_tokens=64, options=EAGER)
    # Padded and fused, sums are rounded in another order: two words that are nearly equal may change places.
    assert (engine(**given).logits.float() - exact).norm() <= 1.25 * (whole - exact).norm()
    steps = engine.generate(
        **given, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    last = steps.logits[0].float() - exact[:, -1]
    assert last.norm() <= 1.5 * (whole - exact)[:, -1].norm()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mp_size": 2}, "mp_size is 2, but there is one rank"),
        ({"mp_size": 0}, "mp_size is 0"),
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"max_tokens": 129}, "the model has 128 positions"),
        ({"checkpoint": "nowhere"}, "no folder with .safetensors"),
        ({"replace_with_kernel_inject": False, "options": {"kernels": "auto"}}, "leave one out"),
        ({"config": {"tp": {"tp_size": 2}}, "mp_size": 2}, "config's tp and mp_size set the same argument"),
        ({"config": {"tensor_parallel": {"tp_size": 2}}}, "mp_size is 2, but there is one rank"),
        ({"config": {"injection_policy": {}}}, "config's injection_policy has no effect: slices are found"),
        ({"max_out_tokens": 129}, "the model has 128 positions"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"quant": {}}, 'quant is not supported: quantize="int8"'),
        ({"speed": 3}, "there is no argument 'speed'"),
    ],
)
def test_what_cannot_be_taken_is_refused(arguments, said):
    with pytest.raises(InferenceError, match=said):
        dsgraph.init_inference(model("llama"), **arguments)


def test_other_models_are_refused_by_name():
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with pytest.raises(InferenceError, match=r"LlamaModel \(model_type 'llama'\)"):
        dsgraph.init_inference(transformers.LlamaModel(transformers.LlamaConfig(**sizes)))
    with pytest.raises(InferenceError, match="Linear"):
        dsgraph.init_inference(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_new_tokens": 60}, "exceed max_tokens=64"),
        ({"max_length": 80}, "exceeds max_tokens=64"),
        ({"cache_implementation": "static"}, "cache_implementation is not supported"),
        ({"max_new_tokens": 3, "output_attentions": True}, "output_attentions=True"),
        ({"max_new_tokens": 8, "prefill_chunk_size": 4}, "the engine takes one"),
        ({"max_new_tokens": 8, "prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is not supported"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is not supported"),
        ({"past_key_values": ()}, "past_key_values is not supported"),
        ({"inputs": torch.ones(1, 2)}, "inputs and input_ids are the same argument"),
    ],
)
def test_what_a_static_cache_cannot_do_is_refused(llama, arguments, said):
    _, engine = llama
    with pytest.raises(InferenceError, match=said):
        engine.generate(**prompt(1, 6), **arguments)
