"""Trains a byte-level Llama for a minute, exports it, rounds its weights to few bits, and streams text.

python -m examples.generate                                  on one rank
python -m examples.generate --bits 4 --prompt "class Node:"  weights of 4 bits, another prompt
python -m examples.generate --folder out                     keeps the weights, and trains no second time

It needs `pip install dsgraph[integrations]`. The folder holds the trained weights as transformers reads them, and
beside them those of few bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import dsgraph
from examples.ranks import Place
from examples.text import standard_library

TIME = 128  # bytes of a line in training
MAX_TOKENS = 256


class Printed(BaseStreamer):
    """Prints bytes as they are generated."""

    def put(self, value: Tensor) -> None:  # [1, prompt] or [1], int64
        sys.stdout.write(bytes(value.flatten().tolist()).decode("utf-8", errors="replace"))
        sys.stdout.flush()

    def end(self) -> None:
        print()


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            bos_token_id=None,
        )
    )


def train(model: LlamaForCausalLM, seconds: float, folder: Path) -> None:
    """Train for so many seconds, without the time to compile, and export the weights."""
    place = Place.join(alone=True)
    config = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
    engine = dsgraph.initialize(model=model, config={**config, "dsgraph": {"codegen": "eager"}})[0]
    text, step, started = standard_library(), 0, 0.0
    while not started or time.perf_counter() - started < seconds:
        tokens, _ = text.batch(step, size=16, time=TIME, seed=0, rank=0, world=1)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        started = started or time.perf_counter()
        step += 1
        place.show(f"step {step}, loss {float(loss.detach()):.3f}")
    place.say(f"{step} steps, loss {float(loss.detach()):.3f} nats a byte")
    engine.export(folder)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.generate", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8, help="of a weight")
    parser.add_argument("--prompt", default="def read(path):\n", help="what the text goes on from")
    parser.add_argument("--tokens", type=int, default=160, help="bytes to generate")
    parser.add_argument("--folder", type=Path, help="for the weights; without it they are not kept")
    wanted = parser.parse_args()
    prompt = torch.tensor([list(wanted.prompt.encode())])
    if prompt.numel() == 0 or prompt.numel() + wanted.tokens > MAX_TOKENS:
        parser.error(f"a prompt of {prompt.numel()} bytes and {wanted.tokens} more: take 1 to {MAX_TOKENS} together")
    with tempfile.TemporaryDirectory() as temporary:
        folder = wanted.folder or Path(temporary)
        whole, small = folder / "whole", folder / f"int{wanted.bits}"
        given = {"max_tokens": MAX_TOKENS, "options": {"codegen": "eager"}}
        if small.exists():
            engine = dsgraph.init_inference(build(), checkpoint=small, **given)
        else:
            if not whole.exists():
                train(build(), wanted.seconds, whole)
            model = LlamaForCausalLM.from_pretrained(whole)
            text = standard_library()
            batches = [text.batch(number, size=16, time=TIME, seed=1, rank=0, world=1)[0] for number in range(4)]
            engine = dsgraph.init_inference(dsgraph.quantize(model, bits=wanted.bits, data=batches), **given)
            dsgraph.save_quantized(engine.module, small)
        torch.manual_seed(0)
        engine.generate(
            prompt, max_new_tokens=wanted.tokens, do_sample=True, temperature=0.7, top_k=20, streamer=Printed()
        )
        print(engine.report())


if __name__ == "__main__":
    main()
