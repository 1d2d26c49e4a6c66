"""One kernel at a time, forward and backward, against plain torch under Inductor and against Liger-Kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.report import Row

WIDTHS = (4096, 8192)
ROWS = 4096
HEAD = 128  # columns of a head
REPEATS = 30
_L2_BYTES = 2**28
"""More than the L2 cache of any GPU."""
_SLEEP_CYCLES = 4_000_000
"""Some 2 ms, in which the host gets ahead: the device then never waits for it."""

_Results = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A kernel in the form in which models use it.

    Attributes:
        name: The kernel's.
        plain: In plain torch.
        ours: By the kernel's op.
        liger: How Liger-Kernel's functional form is called; None where it has none.
        inputs: Makes the inputs, given rows and width; floating ones get gradients.
        bytes_moved: Bytes that a forward and a backward must read and write, of the inputs; None where the kernel is
            not bound by memory.
    """

    name: str
    plain: Callable[..., _Results]
    ours: Callable[..., _Results]
    liger: Callable[[], Callable[..., _Results] | None] | None
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    bytes_moved: Callable[[Sequence[Tensor]], int] | None


def cases() -> list[Case]:
    """Return the kernels that are timed."""
    return [*_norms(), *_of_each_element(), *_of_rows()]


def _norms() -> list[Case]:
    ops: Any = torch.ops.dsgraph
    norm = {"offset": 0.0, "norm_dtype": torch.float32, "dtype": torch.bfloat16}
    return [
        Case(
            "rms_norm",
            plain=lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
            ours=lambda x, w: ops.rms_norm(x, w, 1e-6, **norm)[0],
            liger=lambda: _liger("rms_norm", lambda call: lambda x, w: call(x, w, 1e-6)),
            inputs=lambda rows, width: (_random(rows, width), _random(width)),
            bytes_moved=lambda inputs: 5 * inputs[0].nbytes,  # x, y; x, dy, dx
        ),
        Case(
            "add_rms_norm",
            plain=lambda x, r, w: (F.rms_norm(total := x + r, (x.shape[-1],), w, 1e-6), total),
            ours=lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6, **norm)[:2],
            liger=lambda: _liger("fused_add_rms_norm", lambda call: lambda x, r, w: call(x, r, w, 1e-6)),
            inputs=lambda rows, width: (_random(rows, width), _random(rows, width), _random(width)),
            bytes_moved=lambda inputs: 8 * inputs[0].nbytes,  # x, residual, total, y; total, dy, dtotal, dx
        ),
        Case(
            "layer_norm",
            plain=lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, 1e-5),
            ours=lambda x, w, b: ops.layer_norm(x, w, b, 1e-5, dtype=torch.bfloat16)[0],
            liger=lambda: _liger("layer_norm", lambda call: lambda x, w, b: call(x, w, b, 1e-5)),
            inputs=lambda rows, width: (_random(rows, width), _random(width), _random(width)),
            bytes_moved=lambda inputs: 5 * inputs[0].nbytes,  # x, y; x, dy, dx
        ),
        Case(
            "add_layer_norm",
            plain=lambda x, r, w, b: (F.layer_norm(total := x + r, (x.shape[-1],), w, b, 1e-5), total),
            ours=lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, 1e-5, dtype=torch.bfloat16)[:2],
            liger=None,
            inputs=lambda rows, width: (_random(rows, width), _random(rows, width), _random(width), _random(width)),
            bytes_moved=lambda inputs: 8 * inputs[0].nbytes,  # x, residual, total, y; total, dy, dtotal, dx
        ),
    ]


def _of_each_element() -> list[Case]:
    ops: Any = torch.ops.dsgraph
    turn = {"interleaved": False, "inverse": False, "dtype": torch.bfloat16}
    return [
        Case(
            "rope",
            plain=lambda q, k, cos, sin: (_rotated(q, cos, sin), _rotated(k, cos, sin)),
            ours=lambda q, k, cos, sin: (ops.rope(q, cos, sin, **turn), ops.rope(k, cos, sin, **turn)),
            liger=lambda: _liger("rope", lambda call: call),
            inputs=_heads_and_tables,
            bytes_moved=lambda inputs: 4 * (inputs[0].nbytes + inputs[1].nbytes),  # x, y; dy, dx; tables are small
        ),
        Case(
            "swiglu",
            plain=lambda gate, up: F.silu(gate) * up,
            ours=lambda gate, up: ops.swiglu(gate, up, dtype=torch.bfloat16),
            liger=lambda: _liger("swiglu", lambda call: call),
            inputs=lambda rows, width: (_random(rows, width), _random(rows, width)),
            bytes_moved=lambda inputs: 8 * inputs[0].nbytes,  # gate, up, y; gate, up, dy, dgate, dup
        ),
        Case(
            "geglu",
            plain=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
            ours=lambda gate, up: ops.geglu(gate, up, approximate="tanh", dtype=torch.bfloat16),
            liger=lambda: _liger("geglu", lambda call: call),
            inputs=lambda rows, width: (_random(rows, width), _random(rows, width)),
            bytes_moved=lambda inputs: 8 * inputs[0].nbytes,  # gate, up, y; gate, up, dy, dgate, dup
        ),
        Case(
            "bias_gelu",
            plain=lambda x, b: F.gelu(x + b),
            ours=lambda x, b: ops.bias_gelu(x, b, approximate="none", dtype=torch.bfloat16),
            liger=None,
            inputs=lambda rows, width: (_random(rows, width), _random(width)),
            bytes_moved=lambda inputs: 5 * inputs[0].nbytes,  # x, y; x, dy, dx
        ),
    ]


def _of_rows() -> list[Case]:
    ops: Any = torch.ops.dsgraph
    return [
        Case(
            "softmax_dropout",
            plain=lambda x: F.dropout(F.softmax(x, -1), 0.1),
            ours=lambda x: ops.softmax_dropout(x, 0.1, **dict.fromkeys(("softmax_dtype", "dtype"), torch.bfloat16))[0],
            liger=None,
            inputs=lambda rows, width: (_random(rows, width),),
            bytes_moved=lambda inputs: 5 * inputs[0].nbytes + 2 * inputs[0].numel(),  # x, y, kept; x, dy, kept, dx
        ),
        Case(
            "linear_cross_entropy",
            plain=lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y),
            ours=lambda h, w, y: ops.linear_cross_entropy(h, w, y),
            liger=lambda: _liger("fused_linear_cross_entropy", lambda call: lambda h, w, y: call(h, w, y)),
            inputs=lambda rows, width: (
                _random(rows, width),
                _random(32768, width),
                torch.randint(0, 32768, (rows,), device=torch.get_default_device()),
            ),
            bytes_moved=None,
        ),
    ]


def measure_kernels(*, device: str = "cuda", quick: bool = False) -> Iterator[Row]:
    """Yield one row for each kernel and width."""
    bandwidth = copy_bandwidth(2**20 if quick else 2**28, device)
    for case in cases():
        for width in (64,) if quick else WIDTHS:
            yield _measure(case, 32 if quick else ROWS, width, bandwidth, device)


def _measure(case: Case, rows: int, width: int, bandwidth: float, device: str) -> Row:
    torch.manual_seed(0)
    with torch.device(device):
        inputs = case.inputs(rows, width)
    torch._dynamo.reset()
    systems = {"ours": case.ours, "inductor": torch.compile(case.plain), "plain": case.plain}
    liger = case.liger() if case.liger is not None and device == "cuda" else None
    if liger is not None:
        systems["liger"] = liger
    seconds = {name: _seconds(function, inputs, device) for name, function in systems.items()}
    others = [seconds[name] for name in ("inductor", "liger") if name in seconds]
    moved = case.bytes_moved(inputs) if case.bytes_moved is not None else None
    return {
        "kernel": case.name,
        "width": width,
        **{f"{name}_ms": 1e3 * seconds[name] if name in seconds else None for name in ("ours", "inductor", "liger")},
        "over_fastest": seconds["ours"] / min(others),
        "copy_share": None if moved is None else moved / seconds["ours"] / bandwidth,
    }


def _seconds(function: Callable[..., _Results], inputs: Sequence[Tensor], device: str) -> float:
    """Return the median seconds of a forward and a backward."""
    grads: list[Tensor] = []

    def step() -> None:
        nonlocal grads
        y = function(*inputs)
        outputs = (y,) if isinstance(y, Tensor) else y
        grads = grads or [torch.ones_like(item) for item in outputs]
        torch.autograd.grad(outputs, [item for item in inputs if item.requires_grad], grads)

    return median_seconds(step, device)


def median_seconds(step: Callable[[], object], device: str) -> float:
    """Return the median seconds of a call; on a GPU those of the device, with its L2 cache flushed."""
    for _ in range(3):
        step()
    flush = torch.empty(_L2_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None
    return statistics.median(_once(step, flush) for _ in range(REPEATS))


def _once(step: Callable[[], object], flush: Tensor | None) -> float:
    if flush is None:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bandwidth(elements: int, device: str) -> float:
    """Return the bytes a second, read and written, of copying bfloat16."""
    source, target = (torch.empty(elements, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def _heads_and_tables(rows: int, width: int) -> tuple[Tensor, ...]:
    """Return queries and keys `[1, heads, rows, n]` as projections make them, and tables `[1, rows, n]`."""
    columns = min(HEAD, width)
    q, k = (_random(1, rows, width // columns, columns).transpose(1, 2) for _ in range(2))
    angles = torch.randn(1, rows, columns // 2).repeat(1, 1, 2)
    return q, k, angles.cos().bfloat16(), angles.sin().bfloat16()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does."""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def _liger(name: str, adapt: Callable[[Any], Callable[..., _Results]]) -> Callable[..., _Results] | None:
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    call = getattr(functional, f"liger_{name}", None)
    return None if call is None else adapt(call)
