"""Measures what one GPU runs: kernels alone, products of decoding, and an optimizer on the host.

    python -m benchmarks.gpu --json gpu.json

The device is measured, not the host: a kernel that sleeps lets the host run ahead, and the L2 cache is flushed before
each measurement. `host_ms` is the time until a call returns. Each row is written as soon as it is measured. Parts:
    kernels   forward and backward of each kernel over the faster of plain Inductor's and Liger-Kernel's, and the share
              of the bandwidth of a copy
    decoding  a linear layer of one row, whose weight is bfloat16, int8 or int4, and attention over a cache
    host      a step of AdamW whose state is in the host's memory, and how much memory it pins
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dsgraph
from benchmarks.kernel_rows import copy_bandwidth, measure_kernels, median_seconds
from benchmarks.report import MB, Check, Report, Row, add_arguments, describe_gpu, machine, table
from dsgraph.inductor_ext.quant.weights import quantize_groups, quantize_rows
from dsgraph.optim.host_optimizer import HostOptimizer

assert dsgraph.partition  # registers the ops


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, for any measurements."""
    options = _parse(arguments)
    report = Report(machine={**machine(["triton", "transformers", "liger-kernel"]), **describe_gpu()})
    for part in options.parts:
        for row in PARTS[part](options.device, options.quick):
            report.rows.append({"part": part, **row})
            report.checks += _checks(row)
            print(table([report.rows[-1]]), flush=True)
            report.write(options.json)
    return 0


def _checks(row: Row) -> Iterator[Check]:
    if "kernel" in row:
        name = f"{row['kernel']} at {row['width']}"
        yield Check(f"{name}: time over the fastest other", row["over_fastest"], 1.0, "lower")
        if row["copy_share"] is not None:
            yield Check(f"{name}: share of copy bandwidth", row["copy_share"], 0.85, "higher")


def _kernels(device: str, quick: bool) -> Iterator[Row]:
    return measure_kernels(device=device, quick=quick)


def _decoding(device: str, quick: bool) -> Iterator[Row]:
    """Yield products of one row with weights of a model of 7 billion parameters."""
    ops: Any = torch.ops.dsgraph
    rows, columns = (64, 128) if quick else (11008, 4096)
    with torch.device(device):
        bandwidth = copy_bandwidth(2**20 if quick else 2**28, device)
        weight, x = torch.randn(rows, columns).bfloat16(), torch.randn(1, columns).bfloat16()
        int8, int4 = quantize_rows(weight), quantize_groups(weight, group=64)
        heads = 4 if quick else 32
        q, keys, values = (torch.randn(1, heads, length, 128).bfloat16() for length in (1, 2048, 2048))
        mask = torch.ones(1, 1, 1, 2048, dtype=torch.bool)
    calls: dict[str, tuple[Callable[[], Tensor], int]] = {
        "torch, bfloat16": (lambda: nn.functional.linear(x, weight), weight.nbytes),
        "skinny_linear, bfloat16": (lambda: ops.skinny_linear(x, weight, None, None), weight.nbytes),
        "skinny_linear, int8": (lambda: ops.skinny_linear(x, int8[0], None, int8[1]), int8[0].nbytes),
        "skinny_groups, int4": (lambda: ops.skinny_groups(x, *int4), int4[0].nbytes),
        "decode_attention": (lambda: ops.decode_attention(q, keys, values, mask, scale=0.09), 2 * keys.nbytes),
        "torch, attention": (
            lambda: nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask),
            2 * keys.nbytes,
        ),
    }
    for name, (call, size) in calls.items():
        seconds = median_seconds(call, device)
        yield {"what": name, "ms": 1e3 * seconds, "host_ms": _host_ms(call), "copy_share": size / seconds / bandwidth}


def _host(device: str, quick: bool) -> Iterator[Row]:
    layers, width = (2, 64) if quick else (24, 2048)
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device, torch.bfloat16)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optimizer = HostOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))
    optimizer.step()
    _synchronize()
    started = time.perf_counter()
    optimizer.step()
    _synchronize()
    seconds, size = time.perf_counter() - started, sum(param.nbytes for param in net.parameters())
    yield {
        "what": "HostOptimizer.step",
        "ms": 1e3 * seconds,
        "parameters_mb": size / MB,
        "both_ways_gb_s": 2 * size / seconds / 1e9,
        "pinned_mb": optimizer._pool.held / MB,
    }


PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {"kernels": _kernels, "decoding": _decoding, "host": _host}


def _host_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Return median milliseconds until a call returns."""
    times = []
    for _ in range(repeats):
        _synchronize()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[repeats // 2]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal, with --quick")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="comma-separated")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --quick rehearses the benchmark")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
