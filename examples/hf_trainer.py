"""Trains a small Llama with transformers' `Trainer` and dsgraph underneath, on the bytes of Python's standard library.

dsgraph run --nproc 2 examples/hf_trainer.py                starts two ranks
torchrun --nproc-per-node 2 -m examples.hf_trainer          the same
torchrun --nproc-per-node 2 -m examples.hf_trainer --resume goes on from the latest checkpoint

It needs `pip install dsgraph[integrations]`. `--lora` trains adapters of PEFT on a frozen model.
"""

import argparse
import math

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dsgraph.engine.integrations.trainer import DsgraphTrainer
from examples.text import standard_library

TIME = 64  # bytes a line


class Lines(Dataset):
    """Consecutive pieces of a text: `[TIME]` bytes, which are inputs and labels."""

    def __init__(self, text: torch.Tensor, count: int) -> None:
        self.text, self.count = text, min(count, len(text) // TIME)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        line = self.text[number * TIME : (number + 1) * TIME].long()
        return {"input_ids": line, "labels": line}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def main() -> None:
    """Train, evaluate, save, and say how well it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--config", default="examples/hf_trainer.json", help="the engine's configuration")
    parser.add_argument("--output", default="checkpoints/hf_trainer", help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT")
    args = parser.parse_args()

    model = small_llama()
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    text = standard_library()
    trainer = DsgraphTrainer(
        model,
        TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=10,
            eval_strategy="steps",
            eval_steps=50,
            save_steps=50,
            logging_steps=10,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),  # without it, transformers sees one process where there is no GPU
            disable_tqdm=True,
        ),
        train_dataset=Lines(text.train, 4096),
        eval_dataset=Lines(text.held_out, 64),
        dsgraph_config=args.config,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"final: step {trainer.state.global_step}, held-out loss {loss:.3f}, perplexity {math.exp(loss):.1f}")


if __name__ == "__main__":
    main()
