"""`progressive_layer_drop`: blocks are left out as the paper's equations have it, on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dsgraph
from dsgraph.engine.config.engine_config import ProgressiveLayerDropConfig
from dsgraph.engine.techniques.layer_drop import ProgressiveLayerDrop
from dsgraph.partitioning.state import partition_states
from tests.distributed.training import full

_BLOCKS, _WIDTH, _STEPS = 4, 8, 8
_SECTION = {"enabled": True, "theta": 0.3, "gamma": 0.5}


class _Block(nn.Module):
    def __init__(self, gives_tuple: bool) -> None:
        super().__init__()
        self.gives_tuple = gives_tuple
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Any:
        found = x + torch.tanh(self.inner(x))
        return (found,) if self.gives_tuple else found


class _Model(nn.Module):
    def __init__(self, gives_tuple: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, _WIDTH)
        self.blocks = nn.ModuleList(_Block(gives_tuple) for _ in range(_BLOCKS))
        self.last = nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
        return self.last(x).square().mean()


def _batch(number: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def _probabilities(step: int) -> list[float]:
    theta = (1 - _SECTION["theta"]) * math.exp(-_SECTION["gamma"] * step) + _SECTION["theta"]
    return [1 - block / _BLOCKS * (1 - theta) for block in range(1, _BLOCKS + 1)]


def _written_out(model: _Model, x: Tensor, step: int, micro: int) -> tuple[Tensor, int]:
    """The loss, with blocks left out, and how many were."""
    drawn = torch.rand(_BLOCKS, generator=torch.Generator().manual_seed(micro)).tolist()
    x, left_out = model.first(x), 0
    for block, number, keep in zip(model.blocks, drawn, _probabilities(step), strict=True):
        if number >= keep:
            left_out += 1
        else:
            x = x + torch.tanh(block.inner(x)) / keep
    return model.last(x).square().mean(), left_out


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "progressive_layer_drop": _SECTION,
        "dsgraph": {"codegen": "eager", **more},
    }


def _check_units(engine: dsgraph.Engine, kept: int) -> None:
    """The units are those of a model that drops nothing, and no plan of other layers was followed and left."""
    step = partition_states(engine.module)[0].step
    assert len(step.ran()) == kept and step.left == []
    units = [call.unit.block for call in step.plans.recorded.calls if call.unit.block]
    assert len(units) == kept and len(set(units)) <= 1, "equal blocks share a graph"


def _check(stage: int, compiles: bool, place: str) -> None:
    gives_tuple = stage == 0
    engine = dsgraph.initialize(model=_Model(gives_tuple), config=_config(stage, compile=compiles))[0]
    alone = _Model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    micro = left_out = 0
    for step in range(_STEPS):
        if step == _STEPS // 2:  # the other half in a new engine, from a checkpoint
            engine.save_checkpoint(place)
            engine.close()
            engine = dsgraph.initialize(model=_Model(gives_tuple), config=_config(stage, compile=compiles))[0]
            engine.load_checkpoint(place)
        for _ in range(2):
            for rank in range(2):
                loss, count = _written_out(alone, _batch(micro, rank), step, micro)
                (loss / 4).backward()
            left_out += count
            engine.backward(engine(_batch(micro, dist.get_rank())))
            if stage == 3 and compiles:
                _check_units(engine, _BLOCKS - count)
            engine.step()
            micro += 1
        optimizer.step()
        optimizer.zero_grad()
        for mine, theirs in zip(engine.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine.detach()), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert 0 < left_out < _BLOCKS * micro
    assert engine.progressive_layer_drop.get_theta() == pytest.approx(_probabilities(_STEPS - 1)[-1])
    engine.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(_batch(0, 0)), alone(_batch(0, 0)), rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "compiles"),
    [
        (3, True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, True), (1, True), (2, True), (3, False))),
    ],
)
def test_training_is_that_of_the_papers_equations(ranks, stage, compiles, tmp_path):
    ranks(2).run(_check, stage, compiles, str(tmp_path))


def test_each_block_is_compiled_once_and_what_is_left_out_has_no_gradient(one_rank):
    torch.compiler.reset()
    engine = dsgraph.initialize(model=_Model(), config=_config(1) | {"gradient_accumulation_steps": 1})[0]
    counters.clear()
    kept = []
    with torch._dynamo.config.patch(accumulated_recompile_limit=_BLOCKS - 1):  # 256 for models of more blocks
        for step in range(_STEPS):
            engine.backward(engine(_batch(step, 0)))
            kept.append([block.inner.weight.grad is not None for block in engine.module.blocks])
            engine.step()
    assert counters["stats"]["unique_graphs"] == _BLOCKS, "a graph a block, whatever is left out"
    assert kept[0] == [True] * _BLOCKS, "nothing is left out in the first step"
    assert len({tuple(each) for each in kept}) > 1, "and later other blocks each time"


class _DropsItself(_Model):
    def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:  # type: ignore[override]
        self.given = (progressive_layer_drop, pld_theta)
        return super().forward(x)


def test_a_model_that_drops_layers_itself_is_told_theta(one_rank, capsys):
    engine = dsgraph.initialize(model=_DropsItself(), config=_config(0))[0]
    assert "it is compiled only if it has repeated blocks" in capsys.readouterr().out
    for micro in range(4):
        engine.backward(engine(_batch(micro, 0)))
        engine.step()
    assert engine.module.given == (True, pytest.approx(_probabilities(1)[-1]))


class _GivesTwo(_Block):
    def forward(self, x: Tensor) -> Any:
        return x, x


def _run(block: type[nn.Module], **config: Any) -> None:
    model = _Model()
    model.blocks = nn.ModuleList(block(False) for _ in range(_BLOCKS))
    drop = ProgressiveLayerDrop(ProgressiveLayerDropConfig(enabled=True, **config), model)
    drop.take_over(model)
    model(_batch(0, 0))


def test_what_cannot_be_left_out_is_refused_by_name():
    with pytest.raises(dsgraph.ConfigError, match="names 'block', which is no list of equal blocks"):
        _run(_Block, blocks=("block",))
    with pytest.raises(
        dsgraph.EngineError, match=r"blocks\.0 returns \[\[2, 8\], \[2, 8\]\] for hidden states of \[2, 8\]"
    ):
        _run(_GivesTwo)
    checkpointed = type("_Checkpointed", (_Block,), {"gradient_checkpointing": True})
    with pytest.raises(dsgraph.EngineError, match=r"blocks\.0 uses gradient checkpointing"):
        _run(checkpointed)
    with pytest.raises(dsgraph.ConfigError, match="no list of equal blocks"):
        ProgressiveLayerDrop(ProgressiveLayerDropConfig(enabled=True), nn.Linear(2, 2))
