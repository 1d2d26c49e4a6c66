"""transformers' `Trainer` with the engine underneath, against `Trainer` in one process with the same batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import dsgraph
from tests.distributed.training import full

pytest.importorskip("accelerate")

pytestmark = pytest.mark.distributed

CONFIG: dict[str, Any] = {"dsgraph": {"codegen": "eager"}, "train_batch_size": "auto"}


class _Lines(Dataset):
    def __len__(self) -> int:
        return 44

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        line = (number + torch.arange(8) * (1 + number % 3)) % 32
        return {"input_ids": line, "labels": line}


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.relu(self.layer(self.embedding(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def _small() -> nn.Module:
    torch.manual_seed(0)
    return _Small()


def _llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(made)


def _lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@contextmanager
def _as_launched() -> Iterator[None]:
    """Set the environment of a launcher; accelerate's state is reset at the end."""
    from accelerate.state import AcceleratorState, GradientState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _arguments(folder: str, micro: int, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=2,
        max_steps=7,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        warmup_steps=2,
        weight_decay=0.1,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _alone(make: Any, folder: str) -> tuple[list[float], float, dict[str, Tensor]]:
    from transformers import Trainer

    with _as_launched():
        trainer = Trainer(make(), _arguments(folder, 4), train_dataset=_Lines(), eval_dataset=_Lines())
        trainer.train()
        values = {name: value.detach() for name, value in trainer.model.named_parameters()}
        return _losses(trainer), trainer.evaluate()["eval_loss"], values


def _with_engine(make: Any, folder: str, stage: int, resume: str | None = None, **settings: Any) -> Any:
    from dsgraph.engine.integrations.trainer import DsgraphTrainer

    with _as_launched():
        wanted = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}, **settings}
        trainer = DsgraphTrainer(
            make(), _arguments(folder, 2), train_dataset=_Lines(), eval_dataset=_Lines(), dsgraph_config=wanted
        )
        trainer.train(resume_from_checkpoint=resume)
        values = {name: full(value.detach()) for name, value in trainer.model.named_parameters()}
        return _losses(trainer), trainer.evaluate()["eval_loss"], values


def _same(found: Any, expected: Any) -> None:
    losses, held_out, values = found
    assert losses == pytest.approx(expected[0], rel=1e-4) and len(losses) == 7
    assert held_out == pytest.approx(expected[1], rel=1e-4)
    for name, value in expected[2].items():
        torch.testing.assert_close(
            values[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def _trains_and_resumes(ranks: Any, make: Any, stage: int, folder: Path) -> None:
    # 44 lines in micro-batches of 2 on 2 ranks are 11 a rank: the epoch ends with a step of one micro-batch.
    (expected,) = ranks(1).run(_alone, make, str(folder / "alone"))
    found = ranks(2).run(_with_engine, make, str(folder / "engine"), stage)
    for each in found:
        _same(each, expected)
    again = ranks(2).run(_with_engine, make, str(folder / "again"), stage, str(folder / "engine" / "checkpoint-3"))
    _same(again[0], expected)


def test_losses_are_those_of_one_process_and_it_resumes(ranks, tmp_path):
    _trains_and_resumes(ranks, _small, 3, tmp_path)


# Other stages, and models of transformers and PEFT, run the same lines of the trainer.
@pytest.mark.full
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("make", (_llama, _lora))
def test_models_of_transformers(ranks, tmp_path, make, stage):
    _trains_and_resumes(ranks, make, stage, tmp_path)
    if make is _llama:
        import transformers

        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "engine" / "checkpoint-7")
        (expected,) = ranks(1).run(_alone, make, str(tmp_path / "alone"))
        for name, value in saved.named_parameters():
            torch.testing.assert_close(value.detach(), expected[2][name], rtol=1e-3, atol=1e-4)
    else:
        names = {path.name for path in (tmp_path / "engine" / "checkpoint-7").iterdir()}
        assert "adapter_model.safetensors" in names and "model.safetensors" not in names


def _by_file(folder: str, resume: str | None = None) -> tuple[list[float], list[float]]:
    from dsgraph.engine.integrations.trainer import DsgraphTrainer

    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    wanted = {
        **CONFIG,
        "optimizer": {"type": "AdamW", "params": auto},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
    }
    with _as_launched():
        arguments = _arguments(folder, 2)
        arguments.warmup_steps = 4
        trainer = DsgraphTrainer(_small(), arguments, train_dataset=_Lines(), dsgraph_config=wanted)
        trainer.train(resume_from_checkpoint=resume)
        (group,) = trainer.engine.optimizer.param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.1)
        return _losses(trainer), [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.full  # the same trainer; what differs is who makes optimizer and schedule
def test_the_files_own_optimizer_and_schedule(ranks, tmp_path):
    losses, rates = ranks(2).run(_by_file, str(tmp_path / "one"))[0]
    assert rates[-1] == 1e-2 and sorted(rates) == rates and len(set(rates)) > 2
    assert losses[-1] < losses[0]
    again = ranks(2).run(_by_file, str(tmp_path / "two"), str(tmp_path / "one" / "checkpoint-3"))[0]
    assert again == (pytest.approx(losses), pytest.approx(rates))


def _refusals(folder: str) -> None:
    from dsgraph.engine.integrations.trainer import DsgraphTrainer

    with _as_launched():
        for settings, message in [
            ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu is 3 and per_device"),
            ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "the model has no hidden size"),
            ({"bf16": {"enabled": True}}, "bf16.enabled is True and bf16 False"),
        ]:
            trainer = DsgraphTrainer(
                _small(), _arguments(folder, 2), train_dataset=_Lines(), dsgraph_config={**CONFIG, **settings}
            )
            with pytest.raises(dsgraph.ConfigError, match=message):
                trainer.train()


def test_what_contradicts_the_arguments_is_named(ranks, tmp_path):
    ranks(1).run(_refusals, str(tmp_path))


def _accelerated(stage: int) -> list[float]:
    from dsgraph.engine.integrations.accelerator import DsgraphAccelerator

    with _as_launched():
        wanted = {
            **CONFIG,
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
        }
        accelerator = DsgraphAccelerator(dsgraph_config=wanted, gradient_accumulation_steps=2, cpu=True)
        model = _small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(_Lines(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses


def _accelerated_alone() -> list[float]:
    model = _small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, batch in enumerate(torch.utils.data.DataLoader(_Lines(), batch_size=4)):
        loss = model(**batch)["loss"]
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 or number == 10:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", (3, pytest.param(0, marks=pytest.mark.full)))  # the accelerator knows no stages
def test_a_loop_for_accelerate(ranks, stage):
    expected = _accelerated_alone()
    for losses in ranks(2).run(_accelerated, stage):
        assert losses == pytest.approx(expected, rel=1e-4)


def _resumed(stage: int, place: str) -> None:
    from dsgraph.engine.integrations.accelerator import DsgraphAccelerator

    with _as_launched():
        wanted = {**CONFIG, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        accelerator = DsgraphAccelerator(dsgraph_config=wanted, cpu=True)
        model = _small()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

        def step() -> float:
            batch = next(iter(torch.utils.data.DataLoader(_Lines(), batch_size=2)))
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        step()
        accelerator.save_state(place)
        shapes = {name: value.shape for name, value in accelerator.get_state_dict(model).items()}
        expected = {name: value.shape for name, value in _small().state_dict().items()}
        assert shapes == expected
        after = [step(), step()]
        accelerator.load_state(place)
        assert [step(), step()] == after
        with pytest.raises(dsgraph.CheckpointError, match="no checkpoint 'engine'"):
            accelerator.load_state(f"{place}/engine")


def test_accelerate_saves_and_loads(ranks, tmp_path):
    ranks(2).run(_resumed, 3, str(tmp_path))
