"""Techniques that transform parameters, in stages and slices: the numbers are those of an engine without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dsgraph
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.utils.errors import CheckpointError, ConfigError, OptionError

pytestmark = pytest.mark.distributed

_WIDTH, _ROWS, _COUNT = 8, 4, 2
_FREEZE = 3
_ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 2e-3, "eps": 1e-3, "freeze_step": _FREEZE}}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 16), nn.Linear(16, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        target = x.sum(-1)
        for block in self.blocks:
            x = block(x)
        return (self.head(x).squeeze(-1) - target).square().mean()


def _batches(step: int, copy: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + copy)
    return list(torch.randn(_COUNT, _ROWS, _WIDTH, generator=generator))


def _config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": _ROWS,
        "gradient_accumulation_steps": _COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": 1, "stage3_param_persistence_threshold": 0},
        "dsgraph": {"compile": False},
        **more,
    }


def _engine(config: dict[str, Any]) -> dsgraph.Engine:
    given = {"example": (_batches(0, 0)[0],)} if "parallel" in config else {}
    return dsgraph.initialize(model=_Model(), config=config, **given)[0]


def _train(engine: dsgraph.Engine, steps: range, copy: int = 0) -> list[float]:
    return [float(engine.train_batch(iter(_batches(step, copy)))) for step in steps]


def _full_parameters(engine: dsgraph.Engine) -> dict[str, Tensor]:
    """Return the full parameters that this rank has a part of."""
    if isinstance(engine.module, PipelinedModel):
        return engine.module.full_parameters()
    return {name: param.full_tensor().detach() for name, param in engine.module.named_parameters()}


_SECTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "groups": {"quantize_groups": 4},
    "stochastic": {"quantize_type": "asymmetric", "quantize_rounding": "stochastic"},
}


def _rounded_evaluation(kind: str, parallel: dict[str, int], stage: int, codegen: str) -> tuple[float, float]:
    """Return the loss of an evaluation, and that of the unsplit model with weights that are rounded here."""
    section = {
        "enabled": True,
        "quantize_bits": {"start_bits": 4, "target_bits": 3},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
        **_SECTIONS[kind],
    }
    how = {"codegen": codegen} if codegen else {"compile": False}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = _engine(_config(parallel=parallel, quantize_training=section, zero_optimization=zero, dsgraph=how))
    copy = dist.get_rank() // parallel.get("tp", 1) % parallel.get("dp", 1)
    _train(engine, range(3), copy)
    training = engine.quantized_training
    assert set(training.bits().values()) == {3} and len(training.bits()) == 9

    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, _full_parameters(engine))
    model = _Model()
    model.load_state_dict({name: value for part in held for name, value in part.items()})
    plain = float(sum(model(batch) for batch in _batches(9, 0)) / _COUNT)
    for name, weight in training._weights.items():
        param = model.get_submodule(name).weight
        how = {"symmetric": kind != "stochastic", "stochastic": kind == "stochastic"}
        groups = section.get("quantize_groups", 0)
        param.data = torch.ops.dsgraph.fake_quantize(param.data, weight.control, groups=groups, transposed=False, **how)
    expected = float(sum(model(batch) for batch in _batches(9, 0)) / _COUNT)
    assert abs(expected - plain) > 1e-3 * plain, "the rounding changes the loss"
    found = float(engine.eval_batch(iter(_batches(9, 0))))
    engine.close()
    return found, expected


@pytest.mark.parametrize(
    ("kind", "parallel", "stage", "codegen"),
    [
        ("rows", {"tp": 2}, 0, "eager"),
        ("stochastic", {"tp": 2}, 1, ""),
        ("groups", {"pp": 2}, 3, ""),
        pytest.param("groups", {"dp": 2, "pp": 2}, 3, "eager", marks=pytest.mark.full),
        pytest.param("stochastic", {"tp": 2, "dp": 2}, 3, "eager", marks=pytest.mark.full),
        pytest.param("rows", {"tp": 2, "pp": 2}, 0, "eager", marks=pytest.mark.full),
    ],
)
def test_stages_and_slices_compute_with_rounded_weights(ranks, kind, parallel, stage, codegen):
    world = parallel.get("dp", 1) * parallel.get("tp", 1) * parallel.get("pp", 1)
    for found, expected in ranks(world).run(_rounded_evaluation, kind, parallel, stage, codegen):
        assert found == pytest.approx(expected, rel=1e-5)


def _schedule_goes_on(folder: str) -> None:
    section = {
        "enabled": True,
        "quantize_bits": {"start_bits": 6, "target_bits": 3},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
    }
    config = _config(parallel={"pp": 2}, quantize_training=section)
    first, second = _engine(config), _engine(config)
    _train(first, range(2))
    first.save_checkpoint(folder)
    expected = _train(first, range(2, 5))
    second.load_checkpoint(folder)
    assert _train(second, range(2, 5)) == expected
    assert second.quantized_training.state_dict() == first.quantized_training.state_dict()


def test_a_checkpoint_holds_the_schedule_of_bits(ranks, tmp_path):
    ranks(2).run(_schedule_goes_on, str(tmp_path))


def _one_bit(stage: int, parallel: dict[str, int] | None) -> tuple[list[float], dict[str, Tensor]]:
    more = {"parallel": parallel} if parallel else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = _engine(_config(optimizer=_ONE_BIT, zero_optimization=zero, **more))
    sizes = {"dp": 2, "tp": 1, "pp": 1, **(parallel or {})}
    copy = dist.get_rank() // sizes["tp"] % sizes["dp"]
    losses = _train(engine, range(6), copy)
    assert engine.optimizer.is_compressing and engine.get_global_grad_norm() is None
    return losses, _full_parameters(engine)


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.full)])
def test_stages_exchange_compressed_momentum(ranks, stage):
    """Losses of stages are means over copies."""
    alone = ranks(2).run(_one_bit, stage, None)
    expected = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in alone), strict=True)]
    whole, seen = alone[0][1], set()
    for losses, held in ranks(4).run(_one_bit, stage, {"dp": 2, "pp": 2}):
        assert losses == pytest.approx(expected, rel=1e-6)
        seen |= set(held)
        for name, value in held.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6, msg=name)
    assert seen == set(whole)


@pytest.mark.full  # the checkpoint below has slices of one copy
def test_slices_exchange_compressed_momentum(ranks):
    """Each slice has scales of its own, so numbers differ a little after the warm-up."""
    alone = ranks(2).run(_one_bit, 0, None)
    expected = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in alone), strict=True)]
    found = ranks(4).run(_one_bit, 0, {"dp": 2, "tp": 2})
    for losses, held in found:
        assert losses[: _FREEZE + 1] == pytest.approx(expected[: _FREEZE + 1], rel=1e-5)
        assert losses == pytest.approx(expected, rel=5e-2)
        assert all(torch.equal(value, found[0][1][name]) for name, value in held.items()), "copies are equal"


def _slices_go_on(folder: str) -> list[float]:
    config = _config(parallel={"tp": 2}, optimizer=_ONE_BIT)
    first, second = _engine(config), _engine(config)
    _train(first, range(4))
    first.save_checkpoint(folder)
    expected = _train(first, range(4, 7))
    second.load_checkpoint(folder)
    assert second.optimizer.is_compressing
    assert _train(second, range(4, 7)) == expected
    return expected


def _one_process_goes_on(folder: str) -> list[float]:
    engine = _engine(_config(optimizer=_ONE_BIT))
    engine.load_checkpoint(folder)
    return _train(engine, range(4, 7))


def test_a_checkpoint_of_slices_has_their_errors(ranks, tmp_path):
    """In another layout errors start at zero."""
    expected, _ = ranks(2).run(_slices_go_on, str(tmp_path))
    (losses,) = ranks(1).run(_one_process_goes_on, str(tmp_path))
    assert losses[0] == pytest.approx(expected[0], rel=1e-5) and losses == pytest.approx(expected, rel=5e-2)


def _slices_on_disk(folder: str) -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    engine = _engine(_config(parallel={"tp": 2}, zero_optimization=offload))
    _train(engine, range(1))
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match="is on disk, and this rank has a slice of it"):
        engine.load_checkpoint(folder)
    engine.close()
    other = _engine(_config(parallel={"tp": 2}))
    other.load_checkpoint(folder)
    assert other.counts.steps == 1


def _parameters_on_disk(folder: str) -> None:
    disk = {"stage": 3, "stage3_param_persistence_threshold": 0}
    disk |= {"offload_param": {"device": "nvme", "nvme_path": folder}}
    engine = _engine(_config(parallel={"tp": 2}, zero_optimization=disk))
    _train(engine, range(1))
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match="parameters are on disk, and this rank has a slice of"):
        engine.load_checkpoint(folder)
    engine.close()
    other = _engine(_config(parallel={"tp": 2}))
    other.load_checkpoint(folder)
    assert other.counts.steps == 1


def test_slices_of_parameters_are_not_loaded_to_disk(ranks, tmp_path):
    ranks(2).run(_parameters_on_disk, str(tmp_path))


def test_slices_of_state_are_not_loaded_to_disk(ranks, tmp_path):
    ranks(2).run(_slices_on_disk, str(tmp_path))


def test_what_needs_full_layers_or_a_plan_is_refused(one_rank):
    def refused(kind: str, **more: Any) -> None:
        _engine(_config(parallel={"pp": 2}, optimizer={**_ONE_BIT, "type": kind}, **more))

    with pytest.raises(ConfigError, match="OneBitLamb needs full parameters"):
        refused("OneBitLamb")
    with pytest.raises(ConfigError, match="memory_limit does not count momentum and errors"):
        refused("OneBitAdam", dsgraph={"memory_limit": "1GiB"})


_DROPS = {"enabled": True, "theta": 0.3, "gamma": 0.5}


def _dropping(parallel: dict[str, int] | None, codegen: str, stage: int) -> tuple[list[float], set[str]]:
    """Return losses, and the parameters that some step has not updated."""
    how = {"codegen": codegen} if codegen else {"compile": False}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    more = {"parallel": parallel} if parallel else {}
    engine = _engine(_config(progressive_layer_drop=_DROPS, zero_optimization=zero, dsgraph=how, **more))
    losses = _train(engine, range(8))
    assert engine.progressive_layer_drop.get_theta() < 0.35
    steps = {name: int(engine.optimizer.state[param]["step"]) for name, param in engine.module.named_parameters()}
    evaluated = engine.eval_batch(iter(_batches(9, 0))) if parallel else None
    engine.close()
    return [*losses, float(evaluated or 0)], {name for name, count in steps.items() if count < 8}


@pytest.mark.parametrize(
    ("parallel", "codegen", "stage"),
    [
        ({"pp": 2}, "", 0),
        ({"tp": 2}, "eager", 0),
        pytest.param({"pp": 2}, "eager", 3, marks=pytest.mark.full),
        pytest.param({"tp": 2, "pp": 2}, "eager", 0, marks=pytest.mark.full),
    ],
)
def test_stages_leave_out_the_blocks_of_one_process(ranks, parallel, codegen, stage):
    ((expected, left_out),) = ranks(1).run(_dropping, None, "", 0)
    assert left_out, "some step has left a block out in all its micro-batches"
    found = ranks(parallel.get("tp", 1) * parallel.get("pp", 1)).run(_dropping, parallel, codegen, stage)
    for losses, _ in found:
        assert losses[:-1] == pytest.approx(expected[:-1], rel=1e-5)
    assert set().union(*(names for _, names in found)) == left_out


def _graphs_of(blocks: Any) -> tuple[list[float], int]:
    torch._dynamo.reset()
    counters.clear()
    engine = _engine(_config(parallel={"pp": 2}, dsgraph={"codegen": "eager", "blocks": blocks}))
    losses = _train(engine, range(3))
    return losses, counters["stats"]["unique_graphs"]


def test_equal_blocks_of_a_stage_share_a_graph(ranks):
    ((expected, one), *_) = ranks(2).run(_graphs_of, "none")
    for losses, count in ranks(2).run(_graphs_of, "auto"):
        assert losses == expected
        # Before the blocks, the first one (whose input has no gradient), the other three, after them; not one.
        assert count == one + 3


def _refuse_one_graph() -> None:
    with pytest.raises(OptionError, match="'memory_limit' is planned for one graph"):
        _engine(_config(parallel={"pp": 2}, dsgraph={"blocks": ["blocks"], "memory_limit": "1GiB"}))
    for section, schedule, error in (
        ({"memory_limit": "1GiB"}, "1F1B", "'memory_limit' is planned for one graph"),
        ({}, "ZBVZeroBubble", "not supported with ZBVZeroBubble"),
    ):
        parallel = {"pp": 2, "schedule": schedule}
        with pytest.raises(OptionError, match=error):
            how = {"gradient_accumulation_steps": 4, "dsgraph": {"codegen": "eager", **section}}
            _engine(_config(parallel=parallel, progressive_layer_drop=_DROPS, **how))


def test_blocks_that_need_one_graph_of_a_stage_are_refused(ranks):
    ranks(2).run(_refuse_one_graph)
