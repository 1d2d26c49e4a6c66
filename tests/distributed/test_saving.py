"""Checkpoints of full tensors: loaded into shards, and written by one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dsgraph
from dsgraph.ranks.eager_agreement import VARIABLE
from tests.distributed.test_surgery import _llama
from tests.distributed.training import full
from tests.models import build, tokens

pytestmark = pytest.mark.distributed


def _checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return build("tied").double().state_dict()


def _load(stage: int) -> None:
    alone, model = build("tied"), dsgraph.partition(build("tied"), stage=stage, keep_whole_below=20)
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    batch = tokens(0, 0)
    runs(*batch)  # the gathered copies are fresh
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = _checkpoint()
    kept = dict(given)
    for each in (model, alone):
        assert str(each.load_state_dict(given)) == "<All keys matched successfully>"
    assert all(given[name] is value for name, value in kept.items()), "the caller's dict is the caller's"
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(mine), theirs), name
    torch.testing.assert_close(runs(*batch), alone(*batch))
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    mixed = {
        name: value.clone() * 2 if i % 2 else full(value) * 2
        for i, (name, value) in enumerate(model.state_dict().items())
    }
    model.load_state_dict(mixed)
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(mine), theirs * 2), name


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3])
def test_full_checkpoints_are_loaded(ranks, stage):
    ranks(2).run(_load, stage)


def _load_wrongly() -> None:
    model, alone = dsgraph.partition(nn.Linear(6, 4), keep_whole_below=5), nn.Linear(6, 4)
    good = nn.Linear(6, 4).state_dict()
    for wrong in ({"weight": good["weight"]}, {**good, "more": torch.ones(1)}, {**good, "weight": torch.ones(3, 6)}):
        with pytest.raises(RuntimeError) as expected:
            alone.load_state_dict(wrong)
        with pytest.raises(RuntimeError) as found:
            model.load_state_dict(wrong)
        assert str(found.value) == str(expected.value)
    assert model.load_state_dict({"weight": good["weight"]}, strict=False).missing_keys == ["bias"]
    with pytest.raises(dsgraph.PartitionError, match=r"assign=True.*full tensor 'weight'.*leave assign=True out"):
        model.load_state_dict(good, assign=True)
    with torch.device("meta"):
        empty = dsgraph.partition(nn.Linear(6, 4), keep_whole_below=5)
    with pytest.raises(dsgraph.PartitionError, match=r"'weight' is on the meta device: call dsgraph.materialize"):
        empty.load_state_dict(good)
    dsgraph.materialize(empty, init="empty").load_state_dict(good)
    assert torch.equal(full(dict(empty.named_parameters())["weight"]), good["weight"])


def test_what_does_not_fit_is_named_as_torch_names_it(ranks):
    ranks(2).run(_load_wrongly)


def _save(folder: Path, stage: int, tied: bool, size: str) -> dict[str, Tensor]:
    model = dsgraph.partition(_llama(tied=tied), stage=stage, keep_whole_below=12)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    model.save_pretrained(folder, max_shard_size=size)
    assert (folder / "config.json").exists(), "all ranks return when it is written"
    assert not model.state_dict()["lm_head.weight"].is_meta
    assert isinstance(model.state_dict()["lm_head.weight"], torch.distributed.tensor.DTensor)
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", ["1KB", "1GB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_save_pretrained_is_loaded_by_one_process(ranks, tmp_path, stage, tied, size):
    import transformers

    saved = ranks(2).run(_save, tmp_path, stage, tied, size)[0]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if size == "1KB" else True
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, saved[name]), name


def _use_whole_model_of_the_class(folder: Path) -> None:
    saved = dsgraph.partition(_llama(tied=False), keep_whole_below=0)
    saved.save_pretrained(folder)
    whole = type(saved).from_pretrained(folder)
    given = torch.tensor([[1, 2, 3]])
    expected, found = (model.eval().generate(given, max_new_tokens=3, do_sample=False) for model in (saved, whole))
    assert torch.equal(found, expected)
    whole.resize_token_embeddings(whole.lm_head.weight.shape[0] + 1)
    whole.save_pretrained(folder / "resized")
    again = type(saved).from_pretrained(folder / "resized")
    assert torch.equal(again.lm_head.weight, whole.lm_head.weight)


def test_a_whole_model_of_a_partitioned_ones_class_is_used_as_ever(ranks, tmp_path):
    ranks(1).run(_use_whole_model_of_the_class, tmp_path)


def _fail_to_save(folder: Path) -> None:
    (folder / "file").touch()
    model = dsgraph.partition(_llama(tied=True), keep_whole_below=12)
    expected = NotADirectoryError if dist.get_rank() == 0 else dsgraph.PartitionError
    with pytest.raises(expected, match="Not a directory"):
        model.save_pretrained(folder / "file" / "below")


def test_what_rank_0_cannot_write_is_an_error_on_all(ranks, tmp_path):
    ranks(2).run(_fail_to_save, tmp_path)


def _pickle(folder: Path, stage: int) -> None:
    rank = dist.get_rank()
    model = dsgraph.partition(nn.Linear(6, 4), stage=stage, keep_whole_below=0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert copy.deepcopy(state)["model"].keys() == state["model"].keys()
    torch.save(state, folder / f"{rank}.pt")
    dist.barrier()
    loaded = torch.load(folder / f"{rank}.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    with pytest.raises(dsgraph.PartitionError, match=rf"rank {1 - rank}'s rows of a partitioned model.*engine.export"):
        torch.load(folder / f"{1 - rank}.pt", weights_only=True)
    for part in ("model", "optimizer") if rank == 0 else ():
        with pytest.raises(dsgraph.RanksDisagreeError, match=r"rank 0 pickles its rows.*ranks \[1\].*engine.export"):
            torch.save(state[part], folder / "half.pt")
    dist.barrier()


def test_shards_are_pickled_by_all_ranks_or_none(ranks, tmp_path):
    ranks(2).run(_pickle_patiently, tmp_path, 1)
    with pytest.raises(dsgraph.PartitionError, match="a process without a process group loads it"):
        torch.load(tmp_path / "0.pt", weights_only=True)


def _pickle_whole(folder: Path) -> None:
    model = dsgraph.partition(build("tied"), stage=0)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()
    alone, loaded = build("tied"), torch.load(folder / "model.pt")
    assert {type(value) for value in loaded.values()} == {Tensor}
    alone.load_state_dict(loaded)
    model.load_state_dict({name: value * 2 for name, value in loaded.items()})
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(mine), theirs * 2), name


def test_one_rank_saves_what_all_have_whole(ranks, tmp_path):
    ranks(2).run(_pickle_whole, tmp_path)


def _pickle_patiently(folder: Path, stage: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "2")
        _pickle(folder, stage)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale.exp()).square().mean()


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),  # with a number of its own besides `step`
    "SGD": lambda params: torch.optim.SGD(params, 0.1, 0.9),
}


def _resume_scalar(stage: int) -> None:
    options = StateDictOptions(full_state_dict=True)
    for name, make in _OPTIMIZERS.items():
        torch.manual_seed(0)
        first = dsgraph.partition(_Scaled(), stage=stage, keep_whole_below=0)
        mine = make(first.parameters())
        _step(first, mine, 0)
        saved = get_optimizer_state_dict(first, mine, options=options)  # it shares memory with `mine`
        second = dsgraph.partition(_Scaled(), stage=stage, keep_whole_below=0)
        second.load_state_dict({key: full(value) for key, value in first.state_dict().items()})
        theirs = make(second.parameters())
        set_optimizer_state_dict(second, theirs, saved, options=options)
        for model, optimizer in ((first, mine), (second, theirs)):
            _step(model, optimizer, 1)
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(full(a), full(b)), name


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(4, 6, generator=generator)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", (0, 3))
def test_the_state_of_a_parameter_without_dimensions_is_loaded(ranks, stage):
    ranks(2).run(_resume_scalar, stage)
