"""Unmodified transformers models, built from configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsgraph
from tests.distributed.training import ATOL, RTOL, full

pytestmark = pytest.mark.distributed

VOCAB = 64
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _build(name: str) -> torch.nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    builders: dict[str, Callable[[], torch.nn.Module]] = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER)),
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**DECODER, head_dim=8)),
        "mixtral": lambda: tf.MixtralForCausalLM(
            tf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
        ),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(
                vocab_size=VOCAB,
                n_embd=16,
                n_layer=1,
                n_head=2,
                n_positions=32,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        ),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(vocab_size=VOCAB, **ENCODER)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=VOCAB,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                dropout_rate=0,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        ),
        "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**ENCODER, image_size=16, patch_size=8, num_labels=5)),
    }
    return builders[name]()


def _batch(name: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (2,), generator=generator),
        }
    ids = torch.randint(1, VOCAB, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _train(name: str, checkpointing: bool = False) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = _build(name), _build(name)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded = dsgraph.partition(model, stage=3, keep_whole_below=0)
    compiled = torch.compile(sharded, backend="dsgraph", options={"codegen": "eager"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (sharded, alone)]
    for step in range(2):
        loss = compiled(**_batch(name, step, rank)).loss
        loss.backward()
        losses = [alone(**_batch(name, step, other)).loss for other in range(world)]
        (sum(losses) / world).backward()
        torch.testing.assert_close(loss, losses[rank], rtol=RTOL, atol=ATOL)
        for (key, mine), theirs in zip(sharded.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), key
            if mine.grad is not None:
                _check(full(mine.grad), theirs.grad, f"gradient of {key}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, mine), theirs in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        _check(full(mine), theirs, f"parameter {key}")
    assert sharded.state_dict().keys() == alone.state_dict().keys()


def _check(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(
    "name",
    [
        *[pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen3", "gpt2", "bert", "t5", "mixtral")],
        pytest.param("vit", marks=pytest.mark.full),  # tests/engine/integrations/test_trainer.py trains one
    ],
)
def test_trains_as_in_one_process(ranks, name):
    ranks(2).run(_train, name)


@pytest.mark.full  # test_regions.py has checkpoints inside blocks
def test_gradient_checkpointing(ranks):
    ranks(2).run(_train, "llama", checkpointing=True)


def _initialise(stages: tuple[int, ...]) -> None:
    for stage in stages:
        mine, alone = dsgraph.partition(_build("gpt2"), stage=stage, keep_whole_below=600), _build("gpt2")
        for model, seed in ((mine, 1 + dist.get_rank()), (alone, 1)):
            torch.manual_seed(seed)
            model.apply(model._init_weights)
        for (name, ours), theirs in zip(mine.named_parameters(), alone.parameters(), strict=True):
            assert torch.equal(full(ours), theirs), f"stage {stage}: {name}"


def test_weights_are_initialised_anew(ranks):
    ranks(2).run(_initialise, (0, 1, 3))


def _drop_layers(stage: int, codegen: str | None) -> None:
    import transformers as tf

    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    convolutions = {"conv_dim": (4, 4), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2}
    rest = {"vocab_size": 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    none = dict.fromkeys(("hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout"), 0.0)
    models = []
    for layerdrop in (0.0, 0.5):
        torch.manual_seed(0)
        config = tf.Wav2Vec2Config(**sizes, **convolutions, **rest, **none, layerdrop=layerdrop, final_dropout=0.0)
        models.append(tf.Wav2Vec2Model(config).train())
    alone, model = models
    sharded = dsgraph.partition(model, stage=stage, keep_whole_below=0)
    runs = sharded if codegen is None else torch.compile(sharded, backend="dsgraph", options={"codegen": codegen})
    assert "layerdrop has no effect" in str(dsgraph.report(sharded)) and "layerdrop" not in str(dsgraph.report(alone))
    torch.manual_seed(dist.get_rank())  # each rank would drop other layers
    sounds = torch.randn(2, 2, 256, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        expected = alone(sounds[dist.get_rank()]).last_hidden_state
        torch.testing.assert_close(runs(sounds[dist.get_rank()]).last_hidden_state, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "codegen"),
    [(3, None), *(pytest.param(*way, marks=pytest.mark.full) for way in ((0, "eager"), (1, None), (3, "eager")))],
)
def test_models_that_drop_layers_run_all_of_them(ranks, stage, codegen):
    ranks(2).run(_drop_layers, stage, codegen)


def _adapt_experts(stage: int, codegen: str | None) -> None:
    from peft import LoraConfig, get_peft_model

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        model = get_peft_model(_build("mixtral"), LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]))
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param)
        return model

    alone, model = build(), dsgraph.partition(build(), stage=stage, keep_whole_below=0)
    runs = model if codegen is None else torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(2):
        runs(**_batch("mixtral", step, 0)).loss.backward()
        alone(**_batch("mixtral", step, 0)).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = dict(alone.named_parameters())
    for key, mine in model.named_parameters():
        _check(full(mine), trained[key], f"parameter {key}")


@pytest.mark.full
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_adapters_of_banks_of_experts(ranks, stage, codegen):
    pytest.importorskip("peft")
    ranks(2).run(_adapt_experts, stage, codegen)
