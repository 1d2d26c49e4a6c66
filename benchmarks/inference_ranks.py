"""Two ranks that share each layer of an engine, beside one process of one thread and of two."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import torch

import dsgraph
from benchmarks.inference_model import PROMPT, llama, rate, sizes
from benchmarks.report import Check, Row
from benchmarks.workers import Workers

WEIGHTS = ("fp32", "int8")
# Name -> ranks, and threads of each.
SYSTEMS = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 ranks": (2, 1)}


class Generating:
    """One rank's engine."""

    def __init__(self, weights: str, threads: int, world: int, quick: bool) -> None:
        torch.set_num_threads(threads)
        model = llama(**sizes(quick=quick), positions=256)
        few: Any = None if weights == "fp32" else weights
        self._engine = dsgraph.init_inference(model, mp_size=world, quantize=few, max_tokens=256)
        torch.manual_seed(0)
        self._prompt = torch.randint(1, model.config.vocab_size, (1, PROMPT))
        self._generate(self._prompt, 2)  # compiles

    def _generate(self, prompt: torch.Tensor, new: int) -> Any:
        mask = torch.ones_like(prompt)
        return self._engine.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False)

    def turn(self, new: int) -> tuple[float, float]:
        """Return tokens a second after a prompt, and seconds of the prompt's graph."""
        before = self._engine.report().prompt
        decoded = rate(self._generate, self._prompt, new)
        after = self._engine.report().prompt
        return decoded, (after.seconds - before.seconds) / (after.calls - before.calls)


def sliced(*, quick: bool) -> tuple[list[Row], list[Check]]:
    """Return rows and figures of two ranks over one, all systems of the same weights in turn."""
    rows, figures = [], []
    for weights in WEIGHTS:
        found = _of_weights(weights, quick=quick)
        rows += [_row(f"{weights}, {name}", turns) for name, turns in found.items()]
        figures += _figures(weights, found)
    return rows, figures


def _of_weights(weights: str, *, quick: bool) -> dict[str, list[tuple[float, float]]]:
    turns, new = (2, 4) if quick else (7, 16)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    with ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                Workers(
                    f"{weights}, {name}",
                    Generating,
                    *(weights, threads, world, quick),
                    world=world,
                    environ={"OMP_NUM_THREADS": str(threads)},
                )
            )
            for name, (world, threads) in SYSTEMS.items()
        }
        for _ in range(turns):
            for name, group in groups.items():
                found[name].append(group.call("turn", new)[0])
    return found


def _row(system: str, turns: list[tuple[float, float]]) -> Row:
    tokens_s, prompt_s = (statistics.median(each) for each in zip(*turns, strict=True))
    return {
        **{"system": system, "rows": 1, "prompt": PROMPT, "tokens_s": tokens_s, "token_ms": 1000 / tokens_s},
        "prompt_ms": 1000 * prompt_s,
    }


def _figures(weights: str, found: dict[str, list[tuple[float, float]]]) -> list[Check]:
    """Return medians of the turns' ratios; above 1 two ranks are faster."""
    figures = []
    for other in ("1 process, 1 thread", "1 process, 2 threads"):
        pairs = list(zip(found["2 ranks"], found[other], strict=True))
        decode = statistics.median(mine[0] / theirs[0] for mine, theirs in pairs)
        prompt = statistics.median(theirs[1] / mine[1] for mine, theirs in pairs)
        figures.append(Check(f"{weights}, decode: speed of 2 ranks over {other}", decode, 1.0, "higher"))
        figures.append(Check(f"{weights}, prompt: speed of 2 ranks over {other}", prompt, 1.0, "higher"))
    return figures
