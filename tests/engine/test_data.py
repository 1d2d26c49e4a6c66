"""Which samples a loader gives: the same ones, whatever interrupts it and however many ranks there are."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dsgraph
from dsgraph.engine.data import RankLoader
from tests.distributed.training import full

from .training import config


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor(number)


def _loaders(count: int, micro: int, ranks: int, **more) -> list[RankLoader]:
    return [RankLoader(Numbers(count), micro=micro, ranks=ranks, rank=rank, **more) for rank in range(ranks)]


def _steps(loaders: list[RankLoader], count: int) -> list[set[int]]:
    """The samples of some micro-batches, those of all ranks together."""
    return [{int(item) for loader in loaders for item in loader.next_batch()} for _ in range(count)]


def test_the_order_is_that_of_torchs_sampler():
    """Which DeepSpeed's loader uses: a script sees the same samples on both."""
    for rank in range(2):
        sampler = DistributedSampler(Numbers(11), 2, rank)
        loader = _loaders(11, 2, 2)[rank]
        for epoch in range(2):
            sampler.set_epoch(epoch)
            theirs = [batch.tolist() for batch in DataLoader(Numbers(11), batch_size=2, sampler=sampler)]
            assert [batch.tolist() for batch in loader] == theirs and len(loader) == len(theirs)


@settings(max_examples=60)
@given(
    count=st.integers(1, 60),
    micro=st.integers(1, 4),
    ranks=st.integers(1, 4),
    drop_last=st.booleans(),
    before=st.integers(0, 12),
    data=st.data(),
)
def test_every_sample_comes_once_an_epoch_also_on_another_number_of_ranks(count, micro, ranks, drop_last, before, data):
    each = micro * ranks
    others = data.draw(st.sampled_from([n for n in range(1, each + 1) if each % n == 0]))
    if drop_last and count < each:
        with pytest.raises(dsgraph.ConfigError, match=f"{count} samples; .* takes {each}"):
            _loaders(count, micro, ranks, drop_last=True)
        return
    whole = _steps(_loaders(count, micro, ranks, drop_last=drop_last), before + 8)
    epoch = count // each if drop_last else -(-count // each)
    seen = [number for step in whole[:epoch] for number in step]
    left_out = count - epoch * each if drop_last else 0
    assert len(set(seen)) == min(count - left_out, len(seen)), "none twice"
    if epoch <= len(whole) and not drop_last:
        assert set(seen) == set(range(count))
    loaders = _loaders(count, micro, ranks, drop_last=drop_last)
    assert _steps(loaders, before) == whole[:before]
    (state,) = {tuple(loader.state_dict().items()) for loader in loaders}
    resumed = _loaders(count, each // others, others, drop_last=drop_last)
    for loader in resumed:
        loader.load_state_dict(dict(state))
    for mine, theirs in zip(_steps(resumed, 8), whole[before:], strict=True):
        # At the end of an epoch, how many come twice depends on how many ranks are to have as many.
        is_last = not drop_last and min(len(mine), len(theirs)) < each
        assert mine == theirs or (is_last and (mine < theirs or theirs < mine))


@pytest.mark.parametrize("workers", (0, 2))
def test_a_loop_goes_on_where_it_was_left(workers):
    whole = [batch.tolist() for _ in range(2) for batch in _loaders(10, 2, 1)[0]][:5]
    (loader,) = _loaders(10, 2, 1, num_workers=workers)
    state, others = torch.get_rng_state(), len(multiprocessing.active_children())
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == 2:
            break  # workers have loaded more by now
    assert loader.state_dict() == {"epoch": 0, "drawn": 4, "samples": 10, "seed": 0}
    found.append(loader.next_batch().tolist())
    found += [batch.tolist() for batch in loader]
    assert found == whole and len(loader) == 5
    assert torch.equal(torch.get_rng_state(), state), "the model's random numbers are left alone"
    assert loader.next_batch().tolist() not in found[:1], "another order"
    assert len(multiprocessing.active_children()) == others + workers
    loader.end_loop()
    assert len(multiprocessing.active_children()) == others


def test_another_dataset_is_refused():
    (loader,) = _loaders(10, 2, 1)
    with pytest.raises(dsgraph.ConfigError, match=r"load_state_dict: its loader had 11 samples .*, this one has 10"):
        loader.load_state_dict(_loaders(11, 2, 1)[0].state_dict())
    with pytest.raises(dsgraph.ConfigError, match="training_data has 0 samples"):
        _loaders(0, 2, 1)


class _Pairs(Numbers):
    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0) * number / 10
        return x.sin(), x.cos()


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.layer(x) - y) ** 2).mean()


def _engine(micro: int, samples: int = 22, **more) -> dsgraph.Engine:
    settings = config(1, **{"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 2, **more})
    settings["dsgraph"] = {"compile": False}
    return dsgraph.initialize(model=_Regression(), config=settings, training_data=_Pairs(samples))[0]


def _weights(engine: dsgraph.Engine) -> list[Tensor]:
    return [full(param.detach()).clone() for param in engine.module.parameters()]


def _save(folder: str) -> list[Tensor]:
    engine = _engine(2, dataloader_drop_last=True)
    for _ in range(4):
        engine.train_batch()  # of 8 samples: the second epoch has begun
    assert engine.training_dataloader.state_dict()["epoch"] == 1
    engine.save_checkpoint(folder)
    for _ in range(4):
        engine.train_batch()
    return _weights(engine)


def _go_on(folder: str, micro: int) -> list[Tensor]:
    engine = _engine(micro, dataloader_drop_last=True)
    engine.train_batch()  # which the checkpoint undoes
    engine.load_checkpoint(folder)
    for _ in range(4):
        engine.train_batch()
    return _weights(engine)


def _refuse(folder: str) -> None:
    engine = _engine(2, samples=30)
    before = _weights(engine)
    with pytest.raises(dsgraph.CheckpointError, match="its loader had 22 samples"):
        engine.load_checkpoint(folder)
    for mine, old in zip(_weights(engine), before, strict=True):
        assert torch.equal(mine, old), "nothing was changed"
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None
    without = dsgraph.initialize(model=_Regression(), config=config(1, dsgraph={"compile": False}))[0]
    with pytest.raises(dsgraph.EngineError, match="train_batch: no data"):
        without.train_batch()


@pytest.mark.distributed
def test_an_engine_goes_on_in_the_middle_of_an_epoch(ranks, tmp_path):
    expected = ranks(2).run(_save, str(tmp_path))[0]
    for world, micro in ((2, 2), (1, 4)):
        for mine, theirs in zip(ranks(world).run(_go_on, str(tmp_path), micro)[0], expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0 if world == 2 else 1e-5, atol=0 if world == 2 else 1e-6)
    ranks(1).run(_refuse, str(tmp_path))
