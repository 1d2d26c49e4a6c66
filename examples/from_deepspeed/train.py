"""A training script as one writes it for DeepSpeed. Only the import is another: `import deepspeed` is what it was.

dsgraph run --nproc 2 examples/from_deepspeed/train.py -- --deepspeed_config examples/from_deepspeed/ds.json
torchrun --nproc-per-node 2 -m examples.from_deepspeed.train --deepspeed_config examples/from_deepspeed/ds.json
"""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset

import dsgraph as deepspeed
from examples.gpt import GPT, GPTConfig

VOCAB, TIME = 64, 32


class Counting(Dataset):
    """Numbers that count up in steps of one to three: `[TIME]` inputs and the same, moved by one, as targets."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        line = (number + (1 + number % 3) * torch.arange(TIME + 1)) % VOCAB
        return line[:-1], line[1:]


def main() -> None:
    """Train for some steps, save, and say where it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--losses", type=Path, help="file for the losses of the first rank's micro-batches, as JSON")
    parser.add_argument("--checkpoints", default="", help="folder to save to, and to go on from")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=VOCAB, width=64, heads=4, layers=2))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Counting()
    )
    if args.checkpoints:
        engine.load_checkpoint(args.checkpoints)
    losses = []
    while engine.global_steps < args.steps:
        for tokens, targets in loader:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.global_steps >= args.steps:
                break
    if args.checkpoints:
        engine.save_checkpoint(args.checkpoints)
    if torch.distributed.get_rank() == 0:
        print(f"final: step {engine.global_steps}, loss {loss.item():.3f}")
        if args.losses:
            args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
