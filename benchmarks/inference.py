"""Decoding with `init_inference` beside transformers: a Llama of 120 M parameters, one row, and quantized weights.

    python -m benchmarks.inference --json inference.json

Systems take turns, so that a busy machine slows all of them. Columns:
    system      `eager`, `compiled`: transformers, with its own cache, and with a static cache and torch.compile;
                `fp32`, `bf16`, `int8`, `int4`: an engine, by its weights; all but `bf16` compute in float32;
                `..., 2 ranks`, `..., 1 process, n threads`: the same, ranks of one thread each
    rows        sequences at once
    prompt      tokens of each sequence's prompt
    tokens_s    tokens a second of all sequences after the prompt, median of the turns
    token_ms    milliseconds of one step, median of the turns
    prompt_ms   milliseconds of a prompt, cache and graphs warm; None for systems without a report
    first_s     seconds from `init_inference` to the first token, in a new process: compiled anew, and with Inductor's
                cache on disk
    bound       seconds a token over the seconds in which one copy reads the bytes of the weights, median of the turns
    loss        held-out loss, nats a byte, of a small Llama that is trained on the text of examples/text.py
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import dsgraph
from benchmarks.inference_model import PROMPT, llama, rate, sizes
from benchmarks.inference_ranks import sliced
from benchmarks.report import Check, Report, Row, add_arguments, machine
from examples.text import standard_library

SYSTEMS = ("eager", "compiled", "fp32", "bf16", "int8", "int4")
# Systems, rows at once and tokens of a prompt, besides one row after 64 tokens, which all systems run.
SIZED = ("fp32", "int8")
SIZES = ((1, 192), (4, 64), (16, 64))
PARTS = ("systems", "sizes", "starts", "ranks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: " + ", ".join(PARTS))
    parser.add_argument("--first-token", action="store_true", help="print the seconds to the first token, no more")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts is {options.parts!r}; it takes {', '.join(PARTS)}")
    if options.first_token:
        print(_first_token(quick=options.quick))
        return 0
    report = Report(machine=machine(["transformers"]))
    rows, report.checks = run_parts(parts, quick=options.quick)
    columns = dict.fromkeys(name for row in rows for name in row)
    report.rows = [columns | row for row in rows]
    report.print()
    report.write(options.json)
    return 0


def run_parts(parts: Sequence[str], *, quick: bool) -> tuple[list[Row], list[Check]]:
    """Return rows and figures of some of `PARTS`."""
    rows: list[Row] = []
    figures: list[Check] = []
    if "systems" in parts:
        rows = measure(quick=quick)
        figures = checks(rows)
    if "sizes" in parts:
        rows += other_sizes(quick=quick)
    if "starts" in parts:
        rows += first_tokens(quick=quick)
    if "ranks" in parts:
        of_ranks = sliced(quick=quick)
        rows, figures = rows + of_ranks[0], figures + of_ranks[1]
    return rows, figures


def first_tokens(*, quick: bool) -> list[Row]:
    """Return rows `cold start` and `warm start` of an engine of float32 weights, each in a process of its own."""
    found = []
    with tempfile.TemporaryDirectory() as folder:  # where Inductor keeps what it compiled
        for name in ("cold start", "warm start"):
            command = [sys.executable, "-m", "benchmarks.inference", "--first-token", *(["--quick"] if quick else [])]
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            found.append({"system": name, "first_s": float(done.stdout)})
    return found


def _first_token(*, quick: bool) -> float:
    plain = llama(**sizes(quick=quick), positions=256)
    started = time.perf_counter()
    prompt = _prompt(plain, 1, PROMPT)
    dsgraph.init_inference(plain, max_tokens=256).generate(prompt, max_new_tokens=1, do_sample=False)
    return time.perf_counter() - started


def measure(*, quick: bool) -> list[Row]:
    """Return one row a system."""
    turns, new = (2, 4) if quick else (5, 16)
    plain = llama(**sizes(quick=quick), positions=256)
    prompt = _prompt(plain, 1, PROMPT)
    engines, run = _systems(plain)
    for name in SYSTEMS:
        run[name](prompt, new)  # compiles
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    copies: list[float] = []
    for _ in range(turns):
        copies.append(_copy_seconds(_weight_bytes(plain)))
        for name in SYSTEMS:
            rates[name].append(rate(run[name], prompt, new))
    losses = _losses(quick=quick)
    rows = []
    for name in SYSTEMS:
        bound = [1 / each / seconds for each, seconds in zip(rates[name], copies, strict=True)]
        rows.append(
            {
                **_row(name, prompt, rates[name], engines.get(name)),
                **{"bound": statistics.median(bound) if name == "fp32" else None, "loss": losses.get(name)},
                "_rates": rates[name],
            }
        )
    return rows


def other_sizes(*, quick: bool) -> list[Row]:
    """Return one row for each of `SIZED` and each of `SIZES`."""
    turns, new = (2, 4) if quick else (3, 16)
    plain = llama(**sizes(quick=quick), positions=256)
    _, run = _systems(plain)
    found = []
    for rows, length in SIZES:
        prompt = _prompt(plain, rows, length)
        rates: dict[str, list[float]] = {name: [] for name in SIZED}
        for name in SIZED:
            run[name](prompt, 2)  # compiles
        for _ in range(turns):
            for name in SIZED:
                rates[name].append(rate(run[name], prompt, new))
        found += [_row(name, prompt, rates[name], None) for name in SIZED]
    return found


def _row(name: str, prompt: Tensor, rates: Sequence[float], engine: Any) -> Row:
    tokens_s, (rows, length) = statistics.median(rates), prompt.shape
    counts = engine.report().prompt if engine is not None else None
    return {
        **{"system": name, "rows": rows, "prompt": length, "tokens_s": tokens_s, "token_ms": 1000 * rows / tokens_s},
        "prompt_ms": 1000 * PROMPT / counts.tokens_per_second if counts else None,
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


def _copy_seconds(size: int) -> float:
    """Return the seconds to read so many bytes: a copy reads and writes, so half of one of as many bytes."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    started = time.perf_counter()
    target.copy_(source)
    return (time.perf_counter() - started) / 2


def _losses(*, quick: bool) -> dict[str, float]:
    """Return held-out losses of a byte-level Llama, as it was trained and with weights of few bits."""
    text = standard_library()
    model = llama(layers=2, width=128, words=256, positions=128).train()
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
    """Return the figures to reach; ratios of rates are medians of the turns' ratios.

    Takes the turns out of the rows.
    """
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
