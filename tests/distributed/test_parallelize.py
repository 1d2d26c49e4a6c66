"""Data, tensor and pipeline parallelism at once, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from dsgraph.checkpoint.convert import export_checkpoint
from dsgraph.partitioning.rows import own_part
from dsgraph.utils.errors import CheckpointError, ConfigError, OptionError
from tests.distributed.test_tensor_parallel import _build

pytestmark = pytest.mark.distributed

MICRO_BATCHES = 2


def _ids(step: int) -> torch.Tensor:
    return torch.randint(1, 64, (4 * MICRO_BATCHES, 8), generator=torch.Generator().manual_seed(step))


def _train(dp: int, tp: int, pp: int, zero_stage: int, family: str = "llama", **options: Any) -> float:
    """The largest difference of a loss or norm from one process over three steps, relative."""
    model, alone = _build(family), _build(family)
    mine = len(_ids(0)) // dp
    rows = (dist.get_rank() // tp) % dp
    count = max(MICRO_BATCHES, pp)
    example = _ids(0)[: mine // count]
    parts = dsgraph.parallelize(
        model, dp=dp, tp=tp, pp=pp, zero_stage=zero_stage, microbatches=count,
        example_kwargs={"input_ids": example, "labels": example}, keep_whole_below=40, **options,
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(list(each.parameters()), lr=1e-2, eps=1e-3) for each in (parts, alone)]
    worst = 0.0
    for step in range(3):
        ids = _ids(step)
        own = ids[rows * mine : (rows + 1) * mine]
        loss = parts.step(input_ids=own, labels=own)
        expected = alone(input_ids=ids, labels=ids).loss
        expected.backward()
        norms = parts.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        for one, other in ((loss, expected.detach()), norms):
            worst = max(worst, float((one - other).abs() / other.abs()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in parts.full_parameters().items():
        other = alone.state_dict()[name]
        worst = max(worst, float((value - other).abs().max() / other.abs().max()))
    return worst


def test_two_by_two(ranks):
    """Slices in pipeline stages; test_pipeline.py has stages with data parallelism."""
    assert max(ranks(4).run(_train, 1, 2, 2, 1)) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", (0, 1, 2, 3))
def test_every_zero_stage(ranks, zero_stage):
    assert max(ranks(8).run(_train, 2, 2, 2, zero_stage)) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2)])
def test_other_layouts(ranks, sizes):
    assert max(ranks(4).run(_train, *sizes, 1)) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("family", ["phi3", "falcon-mqa", "bloom"])
def test_fused_heads_in_stages(ranks, family):
    assert max(ranks(4).run(_train, 1, 2, 2, 1, family)) <= 1e-5


def _save(folder: str) -> list[float]:
    """Losses of two steps after the checkpoint, dp 2 x pp 2."""
    parts, optimizer = _divided(2, 1, 2, seed=0)
    _losses(parts, optimizer, 2, first=0)
    parts.save_checkpoint(folder, optimizer)
    return _losses(parts, optimizer, 2, first=2)


def _resume(folder: str, dp: int, tp: int, pp: int) -> list[float]:
    parts, optimizer = _divided(dp, tp, pp, seed=1)
    parts.load_checkpoint(folder, optimizer)
    return _losses(parts, optimizer, 2, first=2)


def _divided(dp: int, tp: int, pp: int, seed: int) -> tuple[dsgraph.PipelinedModel, torch.optim.Optimizer]:
    model = _build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    example = _ids(0)[: len(_ids(0)) // dp // MICRO_BATCHES]
    parts = dsgraph.parallelize(
        model, dp=dp, tp=tp, pp=pp, zero_stage=2, microbatches=MICRO_BATCHES,
        example_kwargs={"input_ids": example, "labels": example}, keep_whole_below=40,
    )  # fmt: skip
    return parts, torch.optim.AdamW(list(parts.parameters()), lr=1e-2, eps=1e-3)


def _losses(parts: dsgraph.PipelinedModel, optimizer: torch.optim.Optimizer, steps: int, first: int) -> list[float]:
    ranks, losses = parts.data_parallel, []
    for step in range(first, first + steps):
        own = _ids(step).chunk(ranks.size())[ranks.rank()] if ranks is not None else _ids(step)
        losses.append(float(parts.step(input_ids=own, labels=own)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.full  # the engine's below is such a checkpoint, loaded in one of these layouts
def test_a_checkpoint_of_one_layout_loads_in_another(ranks, tmp_path):
    expected = ranks(4).run(_save, str(tmp_path))[0]
    for sizes in ((4, 1, 1), (1, 2, 2)):
        assert ranks(4).run(_resume, str(tmp_path), *sizes)[0] == pytest.approx(expected, rel=1e-5)


class _Layers(nn.Module):
    """A buffer that is saved, and one that is not."""

    def __init__(self, layers: int, wide: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(wide))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("passing", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift + self.passing
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).mean()


def _layers(seed: int, layers: int = 4, wide: int = 4) -> tuple[dsgraph.PipelinedModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    parts = dsgraph.parallelize(_Layers(layers, wide), (torch.ones(2, 4),), pp=2, microbatches=2)
    optimizer = torch.optim.AdamW(parts.parameters())
    parts.step(torch.ones(4, 4))
    optimizer.step()
    return parts, optimizer


def _kept(parts: dsgraph.PipelinedModel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [value.clone() for value in (*parts.state_dict().values(), *state)]


def _load_others(folder: str) -> None:
    saved, optimizer = _layers(0)
    saved.save_checkpoint(folder, optimizer)
    same, other = _layers(1)
    same.load_checkpoint(folder, other)
    for one, two in zip(_kept(saved, optimizer), _kept(same, other), strict=True):
        assert torch.equal(one, two)
    sgd = torch.optim.SGD(same.parameters())
    for (parts, taken), message in (
        (_layers(2, layers=3), r"there is 'layers\.3\.\w+' in it, which the model has not"),
        (_layers(2, layers=5), r"there is no 'layers\.4\.bias' in it, which the model has"),
        (_layers(2, wide=1), r"'scale' is \[4\] in it, and \[1\] in the model"),
        ((same, sgd), "its optimizer is AdamW, and the engine's is SGD"),
    ):
        before = _kept(parts, taken)
        with pytest.raises(CheckpointError, match=message):
            parts.load_checkpoint(folder, taken)
        assert all(torch.equal(one, two) for one, two in zip(before, _kept(parts, taken), strict=True))
    wrong: Any = None if dist.get_rank() == 0 else [3]
    with pytest.raises(CheckpointError, match=r"rank 1: client_state is a list; expected a dict"):
        saved.save_checkpoint(folder, optimizer, tag="other", more=wrong)
    dist.barrier()
    if dist.get_rank() == 1:
        path = Path(folder, "state", "__1_0.distcp")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()
    before = _kept(same, other)
    with pytest.raises(CheckpointError, match=r"file __1_0\.distcp is damaged"):
        same.load_checkpoint(folder, other)
    assert all(torch.equal(one, two) for one, two in zip(before, _kept(same, other), strict=True))


def test_a_checkpoint_of_another_model_or_a_damaged_one_changes_no_rank(ranks, tmp_path):
    ranks(2).run(_load_others, str(tmp_path))


def _engine_config(dp: int, tp: int, pp: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": len(_ids(0)) // MICRO_BATCHES // dp,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": 1, "param_persistence_threshold": 40},
        "parallel": {"dp": dp, "tp": tp, "pp": pp},
        "dsgraph": {"codegen": "eager"},
        **more,
    }


def _engine(dp: int, tp: int, pp: int) -> Any:
    rows = len(_ids(0)) // MICRO_BATCHES // dp
    example = {"input_ids": _ids(0)[:rows], "labels": _ids(0)[:rows]}
    engine, *_ = dsgraph.initialize(model=_build("llama"), config=_engine_config(dp, tp, pp), example=example)
    return engine


def _engine_steps(engine: Any, first: int) -> list[float]:
    """Losses and norms of two steps."""
    found = []
    for step in range(first, first + 2):
        own = _ids(step).chunk(engine.dp_world_size)[engine.dp_rank]
        found.append(float(engine.train_batch({"input_ids": ids, "labels": ids} for ids in own.chunk(MICRO_BATCHES))))
        found.append(engine.get_global_grad_norm())
    return found


def _by_engine(folder: str) -> list[float]:
    engine = _engine(2, 1, 2)
    first = _engine_steps(engine, 0)
    torch.manual_seed(dist.get_rank())
    engine.save_checkpoint(folder, client_state={3: ("epoch", 0.5)})
    resumed = _engine(1, 2, 2)
    torch.manual_seed(7)  # tensor-parallel ranks need the same random numbers
    before = torch.get_rng_state()
    path, state = resumed.load_checkpoint(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert path.endswith("global_step2") and state == {3: ("epoch", 0.5)} and resumed.global_steps == 2
    second = _engine_steps(resumed, 2)
    resumed.optimizer.param_groups[0]["made_by"] = resumed if dist.get_rank() == 1 else ""
    with pytest.raises(CheckpointError, match="rank 1: 'made_by' of the optimizer is a Engine"):
        resumed.save_checkpoint(folder)  # the other ranks gather no slices meanwhile
    del resumed.optimizer.param_groups[0]["made_by"]
    resumed.save_checkpoint(folder)
    third = _steps_of_replicas(folder)
    assert engine.load_checkpoint(folder)[0].endswith("global_step6") and engine.global_steps == 6
    return first + second + third + _engine_steps(engine, 6)


def _steps_of_replicas(folder: str) -> list[float]:
    """Losses and norms of two steps after a pipeline's checkpoint, without the section `parallel`."""
    config = _engine_config(dist.get_world_size(), 1, 1)
    del config["parallel"]
    engine, *_ = dsgraph.initialize(model=_build("llama"), config=config)
    engine.load_checkpoint(folder)
    found = []
    for step in range(engine.global_steps, engine.global_steps + 2):
        own = _ids(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = engine.train_batch({"input_ids": ids, "labels": ids} for ids in own.chunk(MICRO_BATCHES))
        dist.all_reduce(loss)
        found += [float(loss / dist.get_world_size()), engine.get_global_grad_norm()]
    engine.save_checkpoint(folder)
    engine.close()
    return found


def _engine_alone(firsts: tuple[int, ...]) -> list[float]:
    engine = _engine(1, 1, 1)
    return [each for first in firsts for each in _engine_steps(engine, first)]


def _two_stages(folder: str) -> list[float]:
    engine = _engine(1, 1, 2)
    first = _engine_steps(engine, 0)
    engine.save_checkpoint(folder, client_state={3: ("epoch", 0.5)})
    resumed = _engine(1, 2, 1)
    path, state = resumed.load_checkpoint(folder)
    assert path.endswith("global_step2") and state == {3: ("epoch", 0.5)} and resumed.global_steps == 2
    return first + _engine_steps(resumed, 2)


def test_the_engine_trains_two_stages_and_goes_on_with_slices(ranks, tmp_path):
    expected = ranks(1).run(_engine_alone, (0, 2))[0]
    assert ranks(2).run(_two_stages, str(tmp_path))[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full  # two ranks above
def test_the_engine_trains_what_the_section_parallel_divides(ranks, tmp_path):
    expected = ranks(1).run(_engine_alone, (0, 2, 4, 6))[0]
    assert ranks(4).run(_by_engine, str(tmp_path))[0] == pytest.approx(expected, rel=1e-5)
    export_checkpoint(tmp_path, tmp_path / "weights", tag="global_step4", shard_bytes=10**9, dtype=None)
    model = _build("llama")
    read = type(model).from_pretrained(tmp_path / "weights").state_dict()
    assert {name: value.shape for name, value in read.items()} == {n: v.shape for n, v in model.state_dict().items()}


def _refuse_config() -> None:
    example = {"input_ids": _ids(0), "labels": _ids(0)}
    for more, message in (
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled is not supported with pipeline stages"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb needs full parameters"),
        ({"parallel": {"dp": 1, "stages": 2}}, "unknown key 'parallel.stages'"),
        ({"parallel": {"dp": 3}}, "parallel: dp 3 x tp 1 need 3 ranks, but there are 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            dsgraph.initialize(model=_build("llama"), config=_engine_config(1, 1, 2, **more), example=example)
    with pytest.raises(ConfigError, match="needs training_data, or example="):
        dsgraph.initialize(model=_build("llama"), config=_engine_config(1, 2, 1))


def test_keys_that_a_divided_model_does_not_heed_are_refused(ranks):
    ranks(2).run(_refuse_config)


def _refuse() -> None:
    model = _build("llama")
    with pytest.raises(OptionError, match=r"dp 2 x tp 2 x pp 1 need 4 ranks, but there are 2"):
        dsgraph.parallelize(model, dp=2, tp=2)
    with pytest.raises(OptionError, match="tp is 0; it takes a number of ranks, 1 or more"):
        dsgraph.parallelize(model, tp=0)


def test_sizes_that_do_not_fit_are_refused(ranks):
    ranks(2).run(_refuse)


def _take_norms(**layout: int) -> None:
    own = 8 // layout.get("dp", 1)
    ids = _ids(0)[:own]
    count = layout.get("pp", 1)
    example = {"input_ids": ids[: own // count], "labels": ids[: own // count]}
    parts = dsgraph.parallelize(_build("llama"), example_kwargs=example, microbatches=count, **layout)
    parts.step(input_ids=ids, labels=ids)
    grads = [param.grad for param in parts.parameters()]
    before = [own_part(grad).clone() for grad in grads]
    for take in (lambda: nn.utils.clip_grad_norm_(parts.parameters(), 1.0), lambda: nn.utils.get_total_norm(grads)):
        with pytest.raises(dsgraph.GradientError, match=r"call clip_grad_norm_\(max_norm\) of what pipeline or"):
            take()
    with pytest.raises((dsgraph.GradientError, dsgraph.PartitionError), match="AdamW"):
        torch.optim.LBFGS(list(parts.parameters())).step(lambda: torch.zeros(()))
    if layout.get("tp", 1) > 1:
        with pytest.raises((dsgraph.GradientError, dsgraph.PartitionError), match="full"):
            torch.optim.Adafactor(parts.parameters()).step()
    assert all(torch.equal(own_part(grad), one) for grad, one in zip(grads, before, strict=True))
    nn.utils.clip_grad_value_(parts.parameters(), 1e-4)  # of each element
    assert all(float(own_part(param.grad).abs().max()) <= 1e-4 for param in parts.parameters())
    torch.optim.AdamW(parts.parameters(), fused=True).step()


@pytest.mark.parametrize("layout", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.full)])
def test_torchs_norms_are_refused_where_they_would_be_those_of_one_rank(ranks, layout):
    ranks(2).run(_take_norms, **layout)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "pp": 2}, {"dp": 2, "tp": 2, "zero_stage": 1}, {"dp": 2, "pp": 2, "zero_stage": 3}]
)
def test_torchs_norms_are_refused_on_every_layout(ranks, layout):
    ranks(4).run(_take_norms, **layout)
