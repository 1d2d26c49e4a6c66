"""Trains BERT on long texts: it guesses masked bytes of Python's standard library, with sparse attention.

dsgraph run --nproc 2 examples/long_bert.py                  16,384 tokens a sequence, on CPUs
python -m examples.long_bert --length 4096 --steps 20        one rank
torchrun --nproc-per-node 2 -m examples.long_bert --mode dense --length 512   for comparison

The model is transformers' own, with a table of 64 positions; nothing in it knows of sparse attention. It
first learns on short texts with dense attention, then on long ones, as Beltagy et al. (arXiv 2004.05150) train theirs.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import dsgraph
from dsgraph.sparse import BSLongformer, Dense, Fixed, Layout
from examples.text import Text, standard_library

MASK = 256  # the byte that stands for a masked one
SHARE = 0.15  # of bytes that are masked
POSITIONS = 64  # that the model is built with: tokens of a short text
SHORT_BATCH, SHORT_LR = 32, 5e-3  # short texts a step, and their learning rate


def layout_of(mode: str) -> Layout:
    if mode == "fixed":
        return Fixed(block=16, num_local_blocks=16)
    return BSLongformer(block=32, num_sliding_window_blocks=7) if mode == "bslongformer" else Dense()


def small_bert(width: int) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=MASK + 1,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    with torch.no_grad():  # a small model learns in seconds, not hours, from weights of this size and from sinusoids
        for weight in (item.weight for item in model.modules() if isinstance(item, torch.nn.Linear)):
            weight.normal_(0, weight.shape[1] ** -0.5)
        angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -3, width // 2)  # [positions, width / 2]
        model.bert.embeddings.position_embeddings.weight.copy_(0.3 * torch.cat([angles.sin(), angles.cos()], dim=1))
        model.bert.embeddings.word_embeddings.weight.normal_(0, 0.3)
    return model


def learn_short_texts(model: BertForMaskedLM, text: Text, options: argparse.Namespace) -> None:
    """Dense attention over texts as long as the table; every rank does the same."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SHORT_LR, fused=True)
    for step in range(options.short_steps):
        optimizer.param_groups[0]["lr"] = SHORT_LR * min(1, (step + 1) / 50)
        tokens, _ = text.batch(step, seed=1, size=SHORT_BATCH, time=POSITIONS, rank=0, world=1)
        loss = model(**masked(tokens, seed=step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 100 == 0:
            print(f"short texts, step {step + 1}: loss {loss.item():.3f}", flush=True)


def masked(tokens: Tensor, seed: int) -> dict[str, Tensor]:
    """Return tokens of which some are masked, and labels that ask for those alone."""
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < SHARE
    return {"input_ids": tokens.masked_fill(hidden, MASK), "labels": tokens.masked_fill(~hidden, -100)}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, text: Text, options: argparse.Namespace) -> float:
    """Return the mean over the ranks, each of which has its own windows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = {"size": options.batch * world, "time": options.length, "rank": rank, "world": world}
    losses = [
        model(**masked(text.held_out_batch(index, options.evaluations, **sizes)[0], seed=index)).loss
        for index in range(options.evaluations)
    ]
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)
    return loss.item() / world


def train(options: argparse.Namespace) -> float:
    """Train, and return the held-out loss in nats a masked byte."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, layout = standard_library(), layout_of(options.mode)
    model = small_bert(options.width)
    learn_short_texts(model, text, options)
    if options.length > POSITIONS:
        dsgraph.extend_positions(model, options.length)
    if rank == 0:
        print(f"{layout.mode}: {layout.density(1, options.length):.1%} of the scores", flush=True)
    sparse = {} if options.mode == "dense" else {"sparse_attention": layout}
    model = dsgraph.compile(model, stage=2, codegen=options.codegen, **sparse)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    sizes = {"size": options.batch * world, "time": options.length, "rank": rank, "world": world}
    for step in range(options.steps):
        begun = time.perf_counter()
        tokens, _ = text.batch(step, seed=0, **sizes)
        loss = model(**masked(tokens, seed=step * world + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step < 3 or (step + 1) % 10 == 0):
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - begun:.1f} s", flush=True)
    return held_out_loss(model, text, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains BERT on long texts with sparse attention.")
    parser.add_argument("--mode", choices=("fixed", "bslongformer", "dense"), default="bslongformer")
    parser.add_argument("--length", type=int, default=16_384, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 32")
    parser.add_argument("--short-steps", type=int, default=400, help="steps on short texts")
    parser.add_argument("--steps", type=int, default=10, help="steps on long texts")
    parser.add_argument("--evaluations", type=int, default=2, help="held-out batches")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="eager")
    return parser.parse_args()


def main() -> None:
    if not dist.is_initialized():
        alone = None if dist.is_torchelastic_launched() else dist.HashStore()
        dist.init_process_group("gloo", **({"store": alone, "rank": 0, "world_size": 1} if alone else {}))
    loss = train(parse())
    if dist.get_rank() == 0:
        print(f"held-out loss {loss:.4f} nats a masked byte", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
