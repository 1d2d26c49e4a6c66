"""Kernels that stand in for what models spell out: how many are found, how exact they are, what they cost and spare.

    python -m benchmarks.kernels --device cpu --json kernels.json

Models are built from configs: transformers' Llama, Qwen3, Gemma and Mistral, and the GPT of the examples. Tables:
    coverage    kernels substituted over places where the model computes them, by its architecture
    exactness   loss and gradients in float32: the largest difference from the plain model's, over the largest value of
                the tensor; in bfloat16: how much further from float32 than the plain bfloat16 model's, in bfloat16's
                rounding errors of the largest value
    steps       a training step under Inductor with every kernel asked for, over the plain model's under Inductor
    memory      forward and backward of a loss of 128 k words and 4 k tokens: bytes beyond inputs and gradients, at most

`benchmarks.gpu` times each kernel on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks.memory import AllocationCounter, build_counter
from benchmarks.report import MB, Check, Report, Row, add_arguments, table
from dsgraph.passes import PassContext, Phase, Pipeline, Runner
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.kernels.substitute_kernels import SubstituteKernels
from examples.gpt import GPT, GPTConfig

LAYERS = 2
ROUNDS = 41
MODELS = ("gpt", "llama", "qwen3", "gemma", "mistral")
# What the language model of the memory table looks like: tokens, words, width.
LOSS, QUICK_LOSS = (4096, 131072, 256), (256, 8192, 32)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models: `width` of the hidden states, rows of `tokens` tokens."""

    width: int = 256
    words: int = 4096
    layers: int = 4
    rows: int = 2
    tokens: int = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whatever the figures are."""
    options = _parse(arguments)
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        library = build_counter(Path(folder)) if options.device == "cpu" else None
        counter = AllocationCounter(library) if library is not None else None  # before the first tensor
    if counter is not None:
        row = _loss_memory(*(QUICK_LOSS if options.quick else LOSS), counter)
        print(table([row]), flush=True)
        report.rows.append(row)
        report.checks.append(Check("linear_cross_entropy: bytes over plain", row["bytes_over_plain"], 0.15, "lower"))
    small = Sizes(width=32, words=128, layers=LAYERS, rows=2, tokens=16)
    for name in options.models:
        coverage = _coverage(name, small)
        exact = _exactness(name, small)
        timed = _steps(name, small if options.quick else Sizes(), options.device, rounds=2 if options.quick else ROUNDS)
        report.rows.append({"model": name, **coverage, **exact, **timed})
        print(table([report.rows[-1]]), flush=True)
        report.checks += _checks(report.rows[-1])
    report.print()
    report.write(options.json)
    return 0


def _checks(row: Row) -> list[Check]:
    name = row["model"]
    return [
        Check(f"{name}: kernels substituted over present", row["substituted"] / row["present"], 1.0, "higher"),
        Check(f"{name}: largest float32 difference", row["fp32"], 1e-5, "lower"),
        Check(f"{name}: bfloat16 error beyond plain bfloat16, in roundings", row["bf16_ulp"], 1.0, "lower"),
        Check(f"{name}: Inductor, step over plain", row["step_over_plain"], 1.0, "lower"),
    ]


class _Loss(nn.Module):
    """Gives the loss of a transformers model and nothing else, as a training step does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
        return loss


def build(name: str, sizes: Sizes) -> nn.Module:
    """Return a model that maps tokens and targets, both `[rows, tokens]`, to a loss; seeded."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(GPTConfig(vocab=sizes.words, width=sizes.width, heads=4, layers=sizes.layers))
    import transformers

    kinds = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma", "mistral": "Mistral"}
    config = getattr(transformers, f"{kinds[name]}Config")(
        vocab_size=sizes.words,
        hidden_size=sizes.width,
        intermediate_size=2 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes.width // 4,
        max_position_embeddings=sizes.tokens,
    )
    return _Loss(getattr(transformers, f"{kinds[name]}ForCausalLM")(config))


def present(name: str, layers: int) -> Counter[str]:
    """Return the computations of a model for which there are kernels, by its architecture."""
    alone = {"qwen3": 2 * layers + 1}.get(name, 1)  # all others are of a sum with a residual
    found = Counter({"rms_norm": alone, "add_rms_norm": 2 * layers, "rope": 2 * layers, "linear_cross_entropy": 1})
    if name != "gpt":  # whose feed-forward has no gate
        found["geglu" if name == "gemma" else "swiglu"] = layers
    return found


def _batch(sizes: Sizes, device: str = "cpu") -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, sizes.words, (sizes.rows, sizes.tokens + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _coverage(name: str, sizes: Sizes) -> Row:
    found: Counter[str] = Counter()

    def backend(gm: GraphModule, _: Sequence[Any]) -> GraphModule:
        Runner(Pipeline([SubstituteKernels(asked=tuple(spec.name for spec in KERNELS))])).run(
            gm, PassContext(Phase.CAPTURE)
        )
        ops = {spec.op: spec.name for spec in KERNELS}
        nodes = [node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes]
        found.update(ops[node.target] for node in nodes if node.target in ops)
        return gm

    torch._dynamo.reset()
    torch.compile(build(name, sizes), backend=backend)(*_batch(sizes))
    expected = present(name, sizes.layers)
    return {"substituted": sum((found & expected).values()), "present": sum(expected.values())}


def _gradients(step: Callable[..., Tensor], model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return loss and gradients."""
    model.zero_grad(set_to_none=True)
    loss = step(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _substituted(model: nn.Module, codegen: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    names = [spec.name for spec in KERNELS]
    return torch.compile(model, backend="dsgraph", options={"codegen": codegen, "kernels": names})


def _exactness(name: str, sizes: Sizes) -> Row:
    batch, model = _batch(sizes), build(name, sizes)
    ours = _gradients(_substituted(model, "eager"), model, batch)
    plain = _gradients(model, model, batch)
    differences = [_apart(a, b) / max(float(b.abs().max()), 1e-30) for a, b in zip(ours, plain, strict=True)]
    low = copy.deepcopy(model).bfloat16()
    truth_model = copy.deepcopy(low).float()
    truth = _gradients(truth_model, truth_model, batch)
    low_ours = _gradients(_substituted(low, "eager"), low, batch)
    low_plain = _gradients(low, low, batch)
    excess = []
    for a, b, exact in zip(low_ours, low_plain, truth, strict=True):
        ulp = torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
        excess.append((_apart(a, exact) - _apart(b, exact)) / max(ulp, 1e-30))
    return {"fp32": max(differences), "bf16_ulp": max(excess)}


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _steps(name: str, sizes: Sizes, device: str, *, rounds: int) -> Row:
    """Compare both models in turn in one process; return the median of the rounds' ratios."""
    batch = _batch(sizes, device)
    torch._dynamo.reset()
    steps = []
    for options in ("none", [spec.name for spec in KERNELS]):
        model = build(name, sizes).to(device)
        if options == "none":
            compiled = torch.compile(model, backend="inductor")
        else:
            compiled = torch.compile(model, backend="dsgraph", options={"kernels": options})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        steps.append(lambda compiled=compiled, optimizer=optimizer: _step(compiled, optimizer, batch))
    for _ in range(3):
        for step in steps:
            step()
    seconds = [[_timed(step, device) for step in (steps if number % 2 else steps[::-1])] for number in range(rounds)]
    pairs = [pair if number % 2 else pair[::-1] for number, pair in enumerate(seconds)]
    return {
        "plain_s": statistics.median(plain for plain, _ in pairs),
        "step_s": statistics.median(ours for _, ours in pairs),
        "step_over_plain": statistics.median(ours / plain for plain, ours in pairs),
    }


def _step(compiled: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    compiled(*batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _timed(step: Callable[[], None], device: str) -> float:
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _loss_memory(tokens: int, words: int, width: int, counter: AllocationCounter) -> Row:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(words, width).div_(width**0.5).requires_grad_()
    targets = torch.randint(0, words, (tokens,))

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), targets)

    row: Row = {"model": f"loss of {words:,} words, {tokens:,} tokens, width {width}"}
    gradients = hidden.nbytes + weight.nbytes
    for system, step in (("plain", loss), ("kernel", _substituted_loss(loss))):
        hidden.grad = weight.grad = None
        step(hidden, weight, targets).backward()  # compiles
        hidden.grad = weight.grad = None
        before = counter.live
        counter.reset_peak()
        started = time.perf_counter()
        step(hidden, weight, targets).backward()
        row[f"{system}_s"] = time.perf_counter() - started
        row[f"{system}_mb"] = (counter.peak - before - gradients) / MB
    row["bytes_over_plain"] = row["kernel_mb"] / row["plain_mb"]
    row["time_over_plain"] = row["kernel_s"] / row["plain_s"]
    return row


def _substituted_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    options: Mapping[str, Any] = {"codegen": "eager", "kernels": ["linear_cross_entropy"]}
    return torch.compile(loss, backend="dsgraph", options=dict(options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where steps and kernels are timed")
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS, help="comma-separated")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.models) - set(MODELS))
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}; known: {', '.join(MODELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
