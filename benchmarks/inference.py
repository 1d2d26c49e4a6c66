"""Decoding with `init_inference` beside transformers: a Llama of 120 M parameters, one row, and weights of few bits.

    python -m benchmarks.inference --json inference.json

Systems take turns, so that a busy machine slows all of them. Columns:
    system      `eager`, `compiled`: transformers, with its own cache, and with a static cache and torch.compile;
                `fp32`, `bf16`, `int8`, `int4`: an engine, by its weights; all but `bf16` compute in float32
    rows        sequences at once
    prompt      tokens of each sequence's prompt
    tokens_s    tokens a second of all sequences behind the prompt, median of the turns
    token_ms    milliseconds of one step, likewise
    prompt_ms   milliseconds of a prompt, cache and graphs warm; None for systems without a report
    first_s     seconds to the first token of an engine that was just made: graphs are traced, and compiled unless
                Inductor's cache on disk has them (with --cold that is an empty folder); None for transformers
    bound       seconds a token over the seconds in which one copy reads the bytes of the weights, median of the turns
    loss        held-out loss, nats a byte, of a small Llama that is trained on the text of examples/text.py
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import dsgraph
from benchmarks.report import Check, Report, Row, add_arguments, machine
from examples.text import standard_library

_PROMPT = 64
_SIZE = {"layers": 12, "width": 768, "words": 32000}
SYSTEMS = ("eager", "compiled", "fp32", "bf16", "int8", "int4")
ENGINES = SYSTEMS[2:]
# Rows at once and tokens of a prompt, besides one row behind 64 tokens, which all systems run.
SIZES = ((1, 192), (4, 64), (16, 64))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--cold", action="store_true", help="compile into an empty cache: first_s is a cold start")
    options = parser.parse_args(arguments)
    with _caches(cold=options.cold):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    report = Report(machine=machine(["transformers"]))
    report.rows = measure(quick=options.quick)
    report.checks = checks(report.rows)
    report.print()
    report.write(options.json)
    return 0


@contextlib.contextmanager
def _caches(*, cold: bool) -> Iterator[None]:
    """Inductor's caches on disk as they are, or empty ones."""
    if not cold:
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def measure(*, quick: bool) -> list[Row]:
    """One row a system, and one for each engine and each of `SIZES`."""
    turns, new = (2, 4) if quick else (5, 16)
    plain = _llama(**({"layers": 2, "width": 128, "words": 1024} if quick else _SIZE), positions=256)
    prompt = _prompt(plain, 1, _PROMPT)
    engines, run = _systems(plain)
    first = {}
    for name in SYSTEMS:
        started = time.perf_counter()
        run[name](prompt, 1)
        first[name] = time.perf_counter() - started if name in engines else None
        run[name](prompt, new)  # compiles the other graph
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    copies: list[float] = []
    for _ in range(turns):
        copies.append(_copy_seconds(_weight_bytes(plain)))
        for name in SYSTEMS:
            rates[name].append(_rate(run[name], prompt, new))
    losses = _losses(quick=quick)
    rows = []
    for name in SYSTEMS:
        bound = [1 / rate / seconds for rate, seconds in zip(rates[name], copies, strict=True)]
        rows.append(
            {
                **_row(name, prompt, rates[name], engines.get(name)),
                "first_s": first[name],
                **{"bound": statistics.median(bound) if name == "fp32" else None, "loss": losses.get(name)},
                "_rates": rates[name],
            }
        )
    return rows + _other_sizes(plain, engines, run, turns=min(turns, 3), new=new)


def _other_sizes(plain: Any, engines: Any, run: Any, *, turns: int, new: int) -> list[Row]:
    found = []
    for rows, length in SIZES:
        prompt = _prompt(plain, rows, length)
        rates: dict[str, list[float]] = {name: [] for name in ENGINES}
        for name in ENGINES:
            run[name](prompt, 2)  # compiles
        for _ in range(turns):
            for name in ENGINES:
                rates[name].append(_rate(run[name], prompt, new))
        found += [_row(name, prompt, rates[name], None) for name in ENGINES]
    return found


def _row(name: str, prompt: Tensor, rates: Sequence[float], engine: Any) -> Row:
    rate, (rows, length) = statistics.median(rates), prompt.shape
    counts = engine.report().prompt if engine is not None else None
    return {
        **{"system": name, "rows": rows, "prompt": length, "tokens_s": rate, "token_ms": 1000 * rows / rate},
        "prompt_ms": 1000 * _PROMPT / counts.tokens_per_second if counts else None,
        **{"first_s": None, "bound": None, "loss": None},
    }


def _prompt(plain: Any, rows: int, length: int) -> Tensor:
    return torch.randint(1, plain.config.vocab_size, (rows, length))


def _weight_bytes(plain: Any) -> int:
    return sum(param.nbytes for name, param in plain.named_parameters() if "embed_tokens" not in name)


def _systems(plain: Any) -> tuple[dict[str, Any], dict[str, Callable[[Tensor, int], Any]]]:
    engines = {"fp32": dsgraph.init_inference(copy.deepcopy(plain), max_tokens=256)}
    engines["bf16"] = dsgraph.init_inference(copy.deepcopy(plain), dtype=torch.bfloat16, max_tokens=256)
    for bits in (8, 4):
        few = dsgraph.quantize(copy.deepcopy(plain), bits=bits)
        engines[f"int{bits}"] = dsgraph.init_inference(few, max_tokens=256)
    compiled = copy.deepcopy(plain)
    compiled.forward = torch.compile(compiled.forward)

    def generating(model: Any, **others: Any) -> Callable[[Tensor, int], Any]:
        def generate(prompt: Tensor, new: int) -> Any:
            mask = torch.ones_like(prompt)
            return model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, **others)

        return generate

    run = {name: generating(engine) for name, engine in engines.items()}
    run["eager"] = generating(plain)
    run["compiled"] = generating(compiled, cache_implementation="static", max_cache_len=256, disable_compile=True)
    return engines, run


def _llama(*, layers: int, width: int, words: int, positions: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": words,
            "hidden_size": width,
            "intermediate_size": width * 8 // 384 * 128,
            "num_hidden_layers": layers,
        },
        **{"num_attention_heads": width // 64, "num_key_value_heads": width // 64},
        **{"max_position_embeddings": positions, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1},
    )
    return transformers.LlamaForCausalLM(config).eval()


def _rate(generate: Callable[[Tensor, int], Any], prompt: Tensor, new: int) -> float:
    """Tokens a second behind the first ones, of all rows: a run of one token is taken off."""
    started = time.perf_counter()
    generate(prompt, 1)
    middle = time.perf_counter()
    generate(prompt, new)
    return len(prompt) * (new - 1) / max(time.perf_counter() - middle - (middle - started), 1e-9)


def _copy_seconds(size: int) -> float:
    """Seconds to read so many bytes: a copy reads and writes, so half of one of as many bytes."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    started = time.perf_counter()
    target.copy_(source)
    return (time.perf_counter() - started) / 2


def _losses(*, quick: bool) -> dict[str, float]:
    """Held-out losses of a byte-level Llama, as it was trained and with weights of few bits."""
    text = standard_library()
    model = _llama(layers=2, width=128, words=256, positions=128).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(3 if quick else 150):
        tokens, targets = text.batch(step, size=8, time=128, seed=0, rank=0, world=1)
        logits = model(tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    found = {"fp32": _held_out(model, text)}
    for bits in (8, 4):
        found[f"int{bits}"] = _held_out(dsgraph.quantize(copy.deepcopy(model), bits=bits, group=None), text)
    return found


@torch.no_grad()
def _held_out(model: Any, text: Any) -> float:
    losses = []
    for index in range(4):
        tokens, targets = text.held_out_batch(index, 4, size=16, time=128, rank=0, world=1)
        logits = model(tokens).logits
        losses.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())))
    return statistics.mean(losses)


def checks(rows: Sequence[Row]) -> list[Check]:
    """The figures to reach; ratios of rates are medians of the turns' ratios. Takes the turns out of the rows."""
    by_name = {row["system"]: row for row in rows if "_rates" in row}
    rates = {name: row.pop("_rates") for name, row in by_name.items()}

    def over(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))

    loss = {name: row["loss"] for name, row in by_name.items()}
    return [
        Check("decode: tokens/s over transformers eager", over("fp32", "eager"), 3.0, "higher"),
        Check("decode: tokens/s over transformers compiled, static cache", over("fp32", "compiled"), 1.15, "higher"),
        Check("decode: tokens/s of INT8 over fp32", over("int8", "fp32"), 2.5, "higher"),
        Check("decode: tokens/s of INT8 over bf16", over("int8", "bf16"), 1.6, "higher"),
        Check("decode: tokens/s of INT4 over fp32", over("int4", "fp32"), 2.5, "higher"),
        Check("decode, fp32: time over reading the weights", by_name["fp32"]["bound"], 1.5, "lower"),
        Check("held-out loss: INT8 over fp32", loss["int8"] / loss["fp32"], 1.002, "lower"),
        Check("held-out loss: INT4, to nearest, over fp32", loss["int4"] / loss["fp32"], 1.03, "lower"),
    ]


if __name__ == "__main__":
    sys.exit(main())
