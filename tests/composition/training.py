"""Trains with some features by the engine, on ranks or in one process, and returns what must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph

from .features import BY_NAME, Feature, build, merged

STEPS, ROWS, TIME = 4, 2, 32
BASE = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
    "zero_optimization": {"stage3_param_persistence_threshold": 0},
    "dsgraph": {"codegen": "eager"},
}


def layout(features: Sequence[Feature]) -> dict[str, int]:
    """Return dp, tp and pp: stages of ZeRO, and runs without slices and stages, have two data-parallel ranks."""
    found = {"dp": 1, "tp": 1, "pp": 1}
    for feature in features:
        found |= feature.layout
    if any(feature.axis == "stage" for feature in features) or found["tp"] * found["pp"] == 1:
        found["dp"] = 2
    return found


def world(names: Sequence[str]) -> int:
    """Return the number of ranks that a run needs."""
    sizes = layout([BY_NAME[name] for name in names])
    return sizes["dp"] * sizes["tp"] * sizes["pp"]


def train(names: Sequence[str], folder: str, alone: bool, steps: int = STEPS) -> list[float] | str:
    """Return the losses of steps and evaluations on this rank, or the error that was raised.

    Args:
        names: The features.
        folder: For files, the same on all ranks.
        alone: True computes the same in one process, without what only distributes or saves memory.
        steps: Number of steps.
    """
    torch._dynamo.reset()
    try:
        return _Run([BY_NAME[name] for name in names], folder, alone=alone).losses(steps)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _Run:
    def __init__(self, features: Sequence[Feature], folder: str, *, alone: bool) -> None:
        self._features, self._folder = features, folder
        sizes = layout(features)
        self._dp = sizes["dp"]
        self._is_staged = sizes["tp"] * sizes["pp"] > 1 and not alone
        config = merged(BASE, *(feature.config for feature in features if not alone or feature.changes_numbers))
        more = next((f.config for f in features if f.axis == "accumulation"), {})
        self._count = max(more.get("gradient_accumulation_steps", 1), sizes["pp"])
        config["gradient_accumulation_steps"] = self._count
        if self._is_staged:
            config["parallel"] = {**config.get("parallel", {}), **sizes}
        self._copy = dist.get_rank() // sizes["tp"] % self._dp if not alone else None
        if alone:
            config["train_micro_batch_size_per_gpu"] = ROWS * self._dp
            config["dsgraph"] = {"compile": "sparse_attention" in config, **config["dsgraph"]}
            if not config["dsgraph"]["compile"]:
                config["dsgraph"].pop("codegen")
        self._config = _in_folder(config, folder)

    def losses(self, steps: int) -> list[float]:
        does = {feature.does for feature in self._features}
        engine, found = self._engine(seed=0), []
        for step in range(steps):
            if step == 2 and "resume" in does:
                engine.save_checkpoint(f"{self._folder}/saved")
                engine.close()
                engine = self._engine(seed=1)
                engine.load_checkpoint(f"{self._folder}/saved")
            found.append(float(engine.train_batch(iter(self._batches(step)))))
            if step == 2 and "evaluate" in does:
                found.append(self._evaluate(engine))
        engine.close()
        return found

    def _engine(self, seed: int) -> Any:
        model = build(self._features)
        if seed:
            for param in model.parameters():
                nn.init.normal_(param, std=0.02)
        given = {"example": self._batches(0)[0]} if self._is_staged else {}
        return dsgraph.initialize(model=model, config=self._config, **given)[0]

    def _evaluate(self, engine: Any) -> float:
        if self._is_staged:
            return float(engine.eval_batch(iter(self._batches(9))))
        engine.eval()
        losses = [engine.eval_batch(iter([batch])) for batch in self._batches(9)]
        engine.train()
        return float(sum(losses)) / len(losses)

    def _batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a step: those of this data-parallel rank, or in one process the rows of all."""
        found = []
        for micro in range(self._count):
            generator = torch.Generator().manual_seed(100 * step + micro)
            text = torch.randint(0, 32, (self._dp, ROWS, TIME + 1), generator=generator)
            own = text.flatten(0, 1) if self._copy is None else text[self._copy]
            found.append((own[:, :-1].contiguous(), own[:, 1:].contiguous()))
        return found


def _in_folder(config: Any, folder: str) -> Any:
    if isinstance(config, dict):
        return {key: _in_folder(value, folder) for key, value in config.items()}
    return folder if config == "FOLDER" else config
