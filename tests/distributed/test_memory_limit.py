"""`memory_limit`: a step stays under it, by computing again, and changes no number."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.passes.memory.fit import PLANNED
from examples.gpt import GPT, GPTConfig
from tests.distributed.training import full

pytestmark = pytest.mark.distributed

SHAPE = GPTConfig(vocab=64, width=32, heads=2, layers=3)
WIDE = GPTConfig(vocab=64, width=64, heads=2, layers=2)


class _WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), targets.flatten())


BUILDS = {"gpt": lambda: GPT(SHAPE), "dropout": _WithDropout, "wide": lambda: GPT(WIDE)}


def _train(
    case: str, stage: int, codegen: str, limit: int | None, tier: str | None = None, blocks: str = "auto"
) -> tuple[list[Tensor], dsgraph.Report]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dsgraph.partition(BUILDS[case](), stage=stage, keep_whole_below=12, blocks=blocks)
    options = {"codegen": codegen, "pipeline": dsgraph.default_pipeline()}
    options |= {} if limit is None else {"memory_limit": limit, "activation_offload": tier}
    compiled = torch.compile(model, backend="dsgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(2):
        torch.manual_seed(100 * step + torch.distributed.get_rank())
        tokens = torch.randint(0, 64, (4, 64))
        loss = compiled(tokens, tokens.roll(-1, 1))
        loss.backward()
        found += [loss.detach(), *(full(param.grad).clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found, dsgraph.report(compiled)


def _keeps(case: str, stage: int, blocks: str) -> None:
    usual, report = _train(case, stage, "eager", None, blocks=blocks)
    peak = report.memory.peak
    with pytest.raises(Exception, match="memory_limit is 1,000 bytes, and a step takes") as refused:
        _train(case, stage, "eager", 1000, blocks=blocks)
    least = int(re.search(r"a step takes ([\d,]+) at least", str(refused.value))[1].replace(",", ""))
    assert least < 0.85 * peak
    room = 2**13 if blocks == "none" else peak // 10  # a plan counts the code around blocks as if it ran uncompiled
    spent = []
    for limit in (least, (least + peak) // 2, peak + room):
        numbers, report = _train(case, stage, "eager", limit, blocks=blocks)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(numbers, usual, strict=True))
        assert report.memory.peak <= limit
        (record,) = [item for each in report.compiles for item in each.passes if item.name == PLANNED]
        found = re.search(r"recomputation takes ([\d.]+) ms", " ".join(record.done))
        spent.append(float(found[1]) if found else 0.0)
    assert spent[0] > spent[1] >= spent[2] == 0.0, f"a larger limit is never slower: {spent}, {least}, {peak}"


@pytest.mark.full  # tests/compiler/memory_limit has limits that are kept with the same numbers
@pytest.mark.parametrize(
    ("case", "stage", "blocks"),
    [("gpt", 3, "auto"), *((case, stage, "none") for case in ("gpt", "dropout") for stage in range(4))],
)
def test_a_step_stays_under_its_limit_with_the_same_numbers(ranks, case, stage, blocks):
    ranks(2).run(_keeps, case, stage, blocks)


def _least(tier: str | None) -> int:
    with pytest.raises(Exception, match="a step takes") as refused:
        _train("wide", 1, "eager", 1000, tier)
    return int(re.search(r"a step takes ([\d,]+) at least", str(refused.value))[1].replace(",", ""))


def _offloads_what_the_plan_says(tier: str) -> None:
    usual, _ = _train("wide", 1, "eager", None)
    least = _least(tier)
    assert least + 2**17 < _least(None)
    numbers, report = _train("wide", 1, "eager", least, tier)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(numbers, usual, strict=True))
    assert report.memory.peak <= least
    (moved,) = [item for each in report.compiles for item in each.passes if item.name == "offload_activations"]
    assert moved.changed
    numbers, report = _train("wide", 1, "eager", 10**9, tier)
    assert not any(item.changed for each in report.compiles for item in each.passes if item.name == moved.name), (
        "nothing moves where everything fits"
    )


@pytest.mark.parametrize(
    ("world", "tier"), ((1, "host"), *(pytest.param(2, tier, marks=pytest.mark.full) for tier in ("host", "disk")))
)
def test_a_plan_offloads_what_keeps_the_limit(ranks, world, tier):
    ranks(world).run(_offloads_what_the_plan_says, tier)


def _keeps_with_inductor(cache: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # what torch has of an earlier run comes without a report of memory
    try:
        usual, report = _train("gpt", 3, "inductor", None)
        limit = int(0.9 * report.memory.peak)
        numbers, report = _train("gpt", 3, "inductor", limit)
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert all(torch.allclose(mine, theirs) for mine, theirs in zip(numbers, usual, strict=True))
    assert report.memory.peak <= limit


@pytest.mark.full
@pytest.mark.inductor
def test_a_step_of_fused_kernels_stays_under_its_limit(ranks, tmp_path):
    ranks(2).run(_keeps_with_inductor, str(tmp_path))
