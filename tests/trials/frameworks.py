"""transformers, PEFT, accelerate, Lightning: the real libraries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from tests.trials.models import MLP, square, train
from tests.trials.trial import COMPILED, UNCOMPILED, trial
from tests.trials.user import User, everybody, full, tokens

_SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _llama(**more: Any) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, num_key_value_heads=1, **{**_SIZES, **more})
    )


def _train(user: User, model: nn.Module, run: Any, *, steps: int = 3, **more: Any) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = optim.AdamW(trained, lr=0.01, eps=1e-3)
    for step in range(steps):
        batch = user.rows(tokens(step, 4, 6))
        loss = run(input_ids=batch, labels=batch, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    for name, param in model.named_parameters():
        user.note(full(param), name)


def _lora(**more: Any) -> Any:
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, **more)


@contextmanager
def _launched(user: User) -> Iterator[None]:
    """Set the environment of torchrun, by which accelerate knows that there are other ranks."""
    from accelerate.state import AcceleratorState, GradientState

    told = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    patch = {} if user.is_alone else {name: str(value) for name, value in told.items()}
    with mock.patch.dict(os.environ, patch):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@trial("PEFT: LoRA over a frozen Llama, partitioned together", needs=("peft",))
def lora(user: User) -> None:
    import peft

    model = peft.get_peft_model(_llama(), _lora())
    model = user.partition(model)
    _train(user, model, user.compile(model))


@trial("PEFT: LoRA put into a Llama that is partitioned, `partition` again, merged at the end", needs=("peft",))
def lora_late(user: User) -> None:
    import peft

    base = user.partition(_llama())
    model = peft.get_peft_model(base, _lora())
    user.again(base)
    _train(user, model, user.compile(model))
    merged = model.merge_and_unload()
    user.loss(merged(input_ids=user.rows(tokens(9, 4, 6)), labels=user.rows(tokens(9, 4, 6))).loss)


@trial("PEFT: DoRA, rank-stabilised scaling, a trained head (`modules_to_save`)", needs=("peft",))
def dora(user: User) -> None:
    import peft

    config = _lora(use_dora=True, use_rslora=True, modules_to_save=["lm_head"])
    model = user.partition(peft.get_peft_model(_llama(), config))
    _train(user, model, user.compile(model))


@trial("PEFT: prompt tuning and IA3", needs=("peft",))
def prompts(user: User) -> None:
    import peft

    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ia3 = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    for config in (prompt, ia3):
        model = user.partition(peft.get_peft_model(_llama(), config))
        _train(user, model, user.compile(model), steps=2)


@trial("PEFT: adapters added, switched, disabled and deleted during training", needs=("peft",))
def adapters(user: User) -> None:
    import peft

    model = user.partition(peft.get_peft_model(_llama(), _lora()))
    _train(user, model, model, steps=1)
    model.add_adapter("second", _lora())
    user.again(model)
    model.set_adapter("second")
    _train(user, model, user.compile(model), steps=2)
    with model.disable_adapter(), torch.no_grad():
        user.loss(model(input_ids=user.rows(tokens(9, 4, 6)), labels=user.rows(tokens(9, 4, 6))).loss)
    model.delete_adapter("default")
    with torch.no_grad():
        user.loss(model(input_ids=user.rows(tokens(9, 4, 6)), labels=user.rows(tokens(9, 4, 6))).loss)


@trial("PEFT: `save_pretrained` of the adapter, `PeftModel.from_pretrained`", needs=("peft",), ways=UNCOMPILED)
def saved_adapter(user: User) -> None:
    import peft

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = user.partition(peft.get_peft_model(_llama(), _lora()))
    _train(user, model, model)
    state = {name: full(value).detach() for name, value in peft.get_peft_model_state_dict(model).items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0], state_dict=state)
    dist.barrier()
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(_llama(), folder[0])
    for name, value in peft.get_peft_model_state_dict(loaded).items():
        user.note(value, name)


@trial("PEFT: `model.save_pretrained(folder)` as it is", needs=("peft",), ways=UNCOMPILED)
def saved_adapter_plainly(user: User) -> None:
    import peft

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = user.partition(peft.get_peft_model(_llama(), _lora()))
    _train(user, model, model)
    model.save_pretrained(folder[0])
    dist.barrier()
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(_llama(), folder[0])
    for name, value in peft.get_peft_model_state_dict(loaded).items():
        user.note(value, name)


@trial(
    "accelerate: `prepare(model)`",
    needs=("accelerate",),
    ways=UNCOMPILED,
    refused=r"its gradients are averaged over the ranks already",
)
def prepared(user: User) -> None:
    from accelerate import Accelerator

    with _launched(user):
        Accelerator(cpu=True).prepare(user.partition(MLP()))


@trial("accelerate: `prepare(optimizer)`, `accelerator.backward`, `clip_grad_norm_`, `gather`", needs=("accelerate",))
def accelerated(user: User) -> None:
    from accelerate import Accelerator

    with _launched(user):
        accelerator = Accelerator(cpu=True)
        model = user.partition(MLP())
        run = user.compile(model)
        optimizer = accelerator.prepare(optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            loss = square(user, run, step)
            accelerator.backward(loss)
            user.note(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)), "norm")
            optimizer.step()
            optimizer.zero_grad()
            user.loss(loss)
    user.parameters(model)


@trial("accelerate: hooks on modules, by `add_hook_to_module`", needs=("accelerate",), ways=UNCOMPILED)
def offloaded(user: User) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Double(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            return tuple(2 * arg for arg in args), kwargs

    model = user.partition(MLP())
    add_hook_to_module(model.head, Double())
    train(user, model, optim.SGD(model.parameters(), lr=0.1))
    user.parameters(model)


@trial("Lightning Fabric: `setup(model, optimizer)` with the strategy of one device", needs=("lightning",))
def fabric(user: User) -> None:
    from lightning.fabric import Fabric

    host = Fabric(accelerator="cpu", devices=1, strategy="auto")
    plain = user.partition(MLP())
    model, optimizer = host.setup(plain, optim.SGD(plain.parameters(), lr=0.1))
    run = user.compile(model)
    for step in range(3):
        loss = square(user, run, step)
        host.backward(loss)
        host.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(plain)


@trial(
    "Lightning: `Trainer.fit` of a module with a partitioned model, with the strategy of one device",
    needs=("lightning",),
)
def lightning_trainer(user: User) -> None:
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self, model: nn.Module, run: Any) -> None:
            super().__init__()
            self.model = model
            self.run = [run]

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss: Tensor = (self.run[0](batch[0]) - batch[1]).square().mean()
            user.loss(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optim.SGD(self.model.parameters(), lr=0.1)

    model = user.partition(MLP())
    data = [(user.numbers(step, 4, 6), user.numbers(50 + step, 4, 4)) for step in range(3)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": True}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, gradient_clip_val=0.1, use_distributed_sampler=False, **quiet
    )
    trainer.fit(Task(model, user.compile(model)), torch.utils.data.DataLoader(data, batch_size=None))
    user.parameters(model)


@trial("transformers: `generate` with a cache: greedy, beams, sampling with a seed", ways=UNCOMPILED)
def generation(user: User) -> None:
    model = user.partition(_llama())
    prompt = tokens(0, 2, 4)
    same: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
    user.note(model.generate(prompt, do_sample=False, **same), "greedy")
    user.note(model.generate(prompt, num_beams=3, do_sample=False, **same), "beams")
    torch.manual_seed(7)
    user.note(model.generate(prompt, do_sample=True, top_k=5, **same), "sampling")


@trial("transformers: a static cache and a step of decoding compiled by the backend", ways=COMPILED)
def static_cache(user: User) -> None:
    import transformers

    model = user.partition(_llama()).eval()
    run = user.compile(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    word = tokens(0, 2, 4)
    with torch.no_grad():
        for step in range(3):
            out = run(input_ids=word, past_key_values=cache, use_cache=True)
            word = out.logits[:, -1:].argmax(-1)
            user.note(word, f"word {step}")


@trial("transformers: `gradient_checkpointing_enable()`, eager attention, custom label smoothing")
def checkpointed(user: User) -> None:
    model = user.partition(_llama(attn_implementation="eager"))
    model.gradient_checkpointing_enable()
    model.train()
    _train(user, model, user.compile(model))


@trial("transformers: `save_pretrained` and `from_pretrained` into a model that is partitioned again", ways=UNCOMPILED)
def pretrained(user: User) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = user.partition(_llama())
    _train(user, model, model)
    model.save_pretrained(folder[0])
    dist.barrier()
    second = user.partition(type(model).from_pretrained(folder[0]) if user.is_alone else _plain(model, folder[0]))
    _train(user, second, second, steps=1)


def _plain(model: nn.Module, folder: str) -> Any:
    return type(_llama()).from_pretrained(folder)


@trial("transformers: Whisper, CLIP, wav2vec 2.0, Mamba, DeBERTa, Swin")
def families(user: User) -> None:
    for name in ("whisper", "clip", "mamba", "deberta", "swin"):
        model = user.partition(_family(name).train())
        run = user.compile(model)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            found = run(**_batch(user, name, step))
            out = found.logits if name != "clip" else found.text_embeds - found.image_embeds
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            user.loss(loss, name)
        user.note(torch.stack([full(p.detach()).norm() for p in model.parameters()]), name)


def _family(name: str) -> Any:
    import transformers as tf

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    makes: dict[str, Any] = {
        "whisper": lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=4, dropout=0.0,
                max_source_positions=4, max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        "clip": lambda: tf.CLIPModel(
            tf.CLIPConfig(
                text_config={**sizes, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 31},
                vision_config={**sizes, "image_size": 8, "patch_size": 4},
                projection_dim=8,
            )
        ),
        "mamba": lambda: tf.MambaForCausalLM(
            tf.MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, state_size=4)
        ),
        "deberta": lambda: tf.DebertaV2ForMaskedLM(
            tf.DebertaV2Config(
                vocab_size=32, **sizes, **no_dropout, relative_attention=True, pos_att_type=["p2c", "c2p"],
                max_position_embeddings=16, position_buckets=4,
            )
        ),
        "swin": lambda: tf.SwinForImageClassification(
            tf.SwinConfig(
                image_size=8, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=2, num_labels=3,
                drop_path_rate=0.0,
            )
        ),
    }  # fmt: skip
    return makes[name]()


def _batch(user: User, name: str, step: int) -> dict[str, Tensor]:
    words = user.rows(tokens(step, 4, 6))
    if name == "whisper":
        return {"input_features": user.numbers(step, 4, 4, 8), "decoder_input_ids": words}
    if name == "clip":
        return {"input_ids": words, "pixel_values": user.numbers(step, 4, 3, 8, 8)}
    if name == "swin":
        return {"pixel_values": user.numbers(step, 4, 3, 8, 8)}
    return {"input_ids": words}


@trial("wav2vec 2.0, whose positions have a weight norm", ways=UNCOMPILED)
def wav2vec(user: User) -> None:
    import transformers as tf

    config = tf.Wav2Vec2Config(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8,), conv_kernel=(4,), conv_stride=(2,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
        final_dropout=0.0, apply_spec_augment=False,
    )  # fmt: skip
    model = user.partition(tf.Wav2Vec2ForCTC(config))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = user.compile(model)(user.numbers(step, 4, 40)).logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.note(torch.stack([full(p.detach()).norm() for p in model.parameters()]))


@trial("transformers: `Trainer` on more than one rank", ways=UNCOMPILED, needs=("accelerate",),
       refused=r"its gradients are averaged over the ranks already")  # fmt: skip
def trainer(user: User) -> None:
    import transformers

    with _launched(user):
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(), use_cpu=True, max_steps=1, report_to=[], per_device_train_batch_size=2,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens(0, 8, 6)]
        transformers.Trainer(user.partition(_llama()), arguments, train_dataset=data).train()


@trial("`F.cross_entropy` of the same batch everywhere, exactly", rtol=0, atol=0, ways=UNCOMPILED)
def exactly(user: User) -> None:
    model = user.partition(MLP())
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        loss = nn.functional.cross_entropy(model(everybody(step, 4, 6)), tokens(step, 4, vocabulary=4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        user.loss(loss)
    user.parameters(model)
