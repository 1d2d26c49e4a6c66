"""`memory_limit` of a pipeline: the measured memory of a rank stays under it, and no number changes."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from benchmarks.memory import AllocationCounter
from dsgraph.parallel.pipeline.schedule_order import ZERO_BUBBLE
from dsgraph.passes.memory.fit import MemoryLimitError
from dsgraph.utils.errors import ConfigError, OptionError
from examples.gpt import GPT, GPTConfig
from tests.distributed.allocations import counter_of

pytestmark = pytest.mark.distributed

COUNT, ROWS, TIME = 4, 2, 64


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, 64, (2, COUNT * ROWS, TIME), generator=generator)
    return x, y


def _pipeline(limit: int | None, *, dp: int = 1, **how: Any) -> dsgraph.PipelinedModel:
    torch.manual_seed(0)
    options = {"codegen": "eager", "strict": True} | ({} if limit is None else {"memory_limit": limit})
    example = tuple(tensor[:ROWS] for tensor in _batch(0))
    layers = 2 if how.get("schedule", "1F1B") in ("1F1B", "GPipe") else 4  # one for each stage
    model = GPT(GPTConfig(vocab=64, width=32, heads=2, layers=layers))
    return dsgraph.parallelize(
        model, example, pp=2, dp=dp, microbatches=COUNT, keep_whole_below=64, options=options, **how
    )


def _train(counter: AllocationCounter, limit: int | None, **how: Any) -> tuple[int, list[Tensor], Any]:
    """Return the measured peak of a step, losses and gradients, and the report."""
    torch._dynamo.reset()
    gc.collect()
    before = counter.live
    piped = _pipeline(limit, **how)
    optimizer = torch.optim.AdamW(piped.parameters(), lr=1e-2, fused=True)
    found = []
    for step in range(2):
        gc.collect()
        counter.reset_peak()
        found.append(piped.step(*_batch(step)))
        optimizer.step()
        piped.zero_grad()
    peak = counter.peak - before
    return peak, [*found, *piped.full_parameters().values()], piped.report


def _of_all(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _keeps(library: str, how: dict[str, Any]) -> tuple[int, int, int]:
    """Return the least limit, which errors name, the peak under it, and the peak without a limit."""
    counter, limit, found = counter_of(library), 1000, None
    free, usual, _ = _train(counter, None, **how)
    free = max(_of_all(free))
    while found is None:
        try:
            found = _train(counter, limit, **how)
        except MemoryLimitError as error:
            said = _of_all(str(error))
            assert len(set(said)) == 1 and re.search(r"rank \d", said[0]), "all ranks raise the same"
            least = int(re.findall(r"takes ([\d,]+) (?:bytes )?at least", said[0])[-1].replace(",", ""))
            assert least > limit
            limit = least
    middle = max(limit, (limit + free) // 2)
    for kept, (peak, numbers, report) in ((limit, found), (middle, _train(counter, middle, **how))):
        assert peak <= kept
        assert all(memory.peak <= memory.limit == kept for memory in report.memory)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(numbers, usual, strict=True))
    return limit, max(_of_all(found[0])), free


@pytest.mark.parametrize(
    "how",
    (
        {"schedule": "1F1B"},
        *(pytest.param({"schedule": name}, marks=pytest.mark.full) for name in ("GPipe", "Interleaved1F1B")),
        *(pytest.param({"schedule": name}, marks=pytest.mark.full) for name in sorted(ZERO_BUBBLE)),
        *(pytest.param({"dp": 2, "zero_stage": stage}, marks=pytest.mark.full) for stage in (0, 1, 3)),
        pytest.param({"dp": 2, "zero_stage": 2, "param_dtype": torch.bfloat16}, marks=pytest.mark.full),
    ),
    ids=str,
)
def test_a_rank_stays_under_its_limit_with_the_same_numbers(ranks, library, how):
    for least, peak, free in ranks(2 * how.get("dp", 1)).run(_keeps, library, how):
        assert peak < free
        # With weight gradients that wait, the prediction adds maxima that are not at one time.
        assert least < 0.9 * free or how.get("schedule") in ZERO_BUBBLE


def _refusals() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(OptionError, match="'memory_limit' is not supported with loss_fn"):
        dsgraph.pipeline(
            torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))),
            *(mesh, (torch.ones(2, 4),)),
            microbatches=2,
            loss_fn=torch.nn.functional.mse_loss,
            options={"codegen": "eager", "memory_limit": 10**6},
        )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsgraph": {"memory_limit": "1GiB", "compile": False},
        "parallel": {"pp": 2},
    }
    model, example = GPT(GPTConfig(vocab=64, width=32, heads=2, layers=2)), tuple(x[:ROWS] for x in _batch(0))
    with pytest.raises(ConfigError, match=r"dsgraph.memory_limit .* dsgraph.compile is false"):
        dsgraph.initialize(model=model, config=config, example=example)


def test_what_cannot_be_planned_is_refused_by_name(ranks):
    ranks(2).run(_refusals)


def _earlier_gradients() -> None:
    piped = _pipeline(10**9)
    piped.step(*_batch(0))
    (memory,) = piped.report.memory
    largest = torch.tensor(memory.peak)
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # ranks with a smaller peak have room, and raise the error as well
    piped = _pipeline(int(largest) + 5000)
    piped.step(*_batch(0))
    with pytest.raises(dsgraph.StrictError, match="bytes of gradients are held from an earlier step"):
        piped.step(*_batch(1))


def test_gradients_of_an_earlier_step_are_named(ranks):
    ranks(2).run(_earlier_gradients)
