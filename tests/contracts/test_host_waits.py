"""The number of times that the host waits for the device in a steady step, and in an evaluation.

On the CPU nothing waits; what is counted are the reads of tensors that make a host wait for a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from tests.contracts.counting import Counting

ROOT = Path(__file__).parents[2]
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
# Reads for which no host waits: a comparison that a GPU makes by itself, and a number that is on the CPU everywhere.
ON_THE_CPU = {"gathered_copies.py:_differs", "one_bit.py:_update"}


class _Reads(Counting):
    """Counts reads of tensors by the host: file and function of ours, and times."""

    def note(self) -> None:
        """Count one read of the innermost function of the product."""
        frame = sys._getframe(1)
        while frame.f_back is not None and not _is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        if place not in ON_THE_CPU:
            self.count[place] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self.note()
        return func(*args, **(kwargs or {}))


def _is_ours(file: str) -> bool:
    return any(Path(file).is_relative_to(ROOT / folder) for folder in ("dsgraph", "passes", "inductor_ext"))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count reads; `tolist` is none of a dispatched op."""
    reads, tolist = _Reads(), Tensor.tolist

    def noted(tensor: Tensor) -> Any:
        reads.note()
        return tolist(tensor)

    with monkeypatch.context() as patch, reads:
        patch.setattr(Tensor, "tolist", noted)
        yield reads.count


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.relu(self.first(x))) - x).square().mean()


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsgraph": {"codegen": "eager"},
        **more,
    }


def _one_bit(name: str) -> dict[str, Any]:
    return _config(0, optimizer={"type": name, "params": {"lr": 1e-3, "freeze_step": 2}})


_NORM, _STEPS, _WRITTEN = "gradient_norm.py:norm", "one_bit.py:count_steps", "gathered_copies.py:were_written"
_USED = "reduce_accumulated.py:used_anywhere"
# Configuration -> waits of a step, and of an evaluation. At stages 1 and 2 an evaluation asks once whether anyone has
# written to a shard through `.data`, as a moving average does. Where micro-batches are reduced once a step, the host
# asks which parameters any rank has used. bf16 checks for overflow by default.
TABLE: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    "stage 0": (_config(0), {}, {}),
    "stage 1": (_config(1), {}, {_WRITTEN: 1}),
    "stage 2": (_config(2), {}, {_WRITTEN: 1}),
    "stage 3": (_config(3), {}, {}),
    "clipped": (_config(3, gradient_clipping=1.0), {_NORM: 1}, {}),
    "fp16": (_config(3, fp16={"enabled": True, "initial_scale_power": 4}), {_NORM: 1}, {}),
    "bf16": (_config(3, bf16={"enabled": True}), {_NORM: 1}, {}),
    "accumulation, stage 3": (_config(3, gradient_accumulation_steps=2), {}, {}),
    "accumulation, stage 1": (_config(1, gradient_accumulation_steps=2), {_USED: 1}, {_WRITTEN: 1}),
    "OneBitAdam": (_one_bit("OneBitAdam"), {_STEPS: 1}, {}),
    "OneBitLamb": (_one_bit("OneBitLamb"), {_STEPS: 1}, {}),
}


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("case", TABLE)
def test_the_host_waits_as_often_as_the_table_says(case, monkeypatch):
    if case == "fp16" and torch.__version__ < "2.13":
        pytest.skip("torch's fake ranks leave reduced gradients as the memory was")
    config, of_step, of_evaluation = TABLE[case]
    torch.manual_seed(0)
    engine, *_ = dsgraph.initialize(model=_Net(), config=config)
    x = torch.randn(4, 16)

    def step() -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(x))
            engine.step()

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()

    for _ in range(4):  # compiles, and the end of the warm-up of 1-bit optimizers
        step()
        evaluate()
    with counting(monkeypatch) as in_step:
        step()
    step()
    evaluate()
    with counting(monkeypatch) as in_evaluation:
        evaluate()
    engine.close()
    assert (dict(in_step), dict(in_evaluation)) == (of_step, of_evaluation)
