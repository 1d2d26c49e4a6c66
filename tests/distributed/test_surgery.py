"""Models that are changed after they were partitioned: parts are added, replaced, resized and copied."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsgraph
from tests.distributed.training import ATOL, RTOL, full

pytestmark = pytest.mark.distributed

Change = Callable[[nn.Module], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.between, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.between(torch.tanh(self.inward(x))))), x[:, :5])


class Adapted(nn.Module):
    """A Linear with a low-rank adapter, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merge(self) -> nn.Linear:
        self.base.weight.data += self.up.weight @ self.down.weight
        return self.base


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _new_head(model: nn.Module) -> None:
    model.head = nn.Linear(8, 5)


def _new_weight(model: nn.Module) -> None:
    model.between.weight = nn.Parameter(torch.randn(8, 8))


def _new_bias(model: nn.Module) -> None:
    model.head.bias = None
    model.head.register_parameter("bias", nn.Parameter(torch.randn(5)))


def _adapter(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad_(False)
    model.between = Adapted(model.between)


CHANGES = {"head": _new_head, "weight": _new_weight, "bias": _new_bias, "adapter": _adapter}


def _batches(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(3, 6, generator=generator)


def _step(runs: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    runs(batch).backward()
    optimizer.step()


def _step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    optimizer.zero_grad()
    (sum(model(batch) for batch in batches) / len(batches)).backward()
    optimizer.step()


def _added(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [param for param in model.parameters() if id(param) not in known]


def _change_and_train(change: Change, stage: int, codegen: str | None) -> None:
    """Trains, changes the model, is told to partition again, does so, and trains on with the optimizer that it has."""
    alone, model = _net(), dsgraph.partition(_net(), stage=stage, keep_whole_below=9)
    torch._dynamo.reset()
    runs = torch.compile(model, backend="dsgraph", options={"codegen": codegen}) if codegen else model
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, alone)]
    streams = [_batches(rank) for rank in range(dist.get_world_size())]
    for step in range(4):
        if step == 2:
            torch.manual_seed(1)
            change(alone)
            torch.manual_seed(1 + dist.get_rank())  # the first rank's values count
            change(model)
            with pytest.raises(
                Exception, match=r"was put into the model after dsgraph.partition.*partition\(model\) again"
            ):
                _train_anyway(runs)
            model.zero_grad()
            dsgraph.partition(model)
            for each, optimizer in zip((model, alone), optimizers, strict=True):
                optimizer.add_param_group({"params": _added(each, optimizer)})
        batches = [next(stream) for stream in streams]
        _step(runs, optimizers[0], batches[dist.get_rank()])
        _step_alone(alone, optimizers[1], batches)
    _check(model, alone)


def _train_anyway(runs: nn.Module) -> None:
    optimizer = torch.optim.SGD(runs.parameters(), lr=0.1)
    _step(runs, optimizer, torch.randn(3, 6))


def _check(model: nn.Module, alone: nn.Module) -> None:
    theirs = dict(alone.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(theirs)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        torch.testing.assert_close(full(param), theirs[name], rtol=RTOL, atol=ATOL, msg=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("codegen", [None, "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_new_is_taken_in_and_trained(ranks, change, stage, codegen):
    ranks(2).run(_change_and_train, CHANGES[change], stage, codegen)


def _wrap_and_tie(stage: int) -> None:
    """A model around the partitioned one, with a layer of its own and one that is tied to a shard."""
    inner = dsgraph.partition(_net(), stage=stage, keep_whole_below=9)
    inner.inward(torch.randn(1, 6))
    outer = nn.Sequential(inner.between, nn.Linear(8, 8, bias=False), nn.Linear(8, 8), inner)
    outer[1].weight = dict(inner.named_parameters())["between.weight"]
    dsgraph.partition(outer)
    assert outer[1]._parameters["weight"] is inner.between._parameters["weight"], "tied"
    batch = torch.randn(2, 8)
    torch.testing.assert_close(outer[1](batch) + full(inner.between._parameters["bias"]), inner.between(batch))
    assert all(isinstance(param, DTensor) for param in outer.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_built_around_a_partitioned_one(ranks, stage):
    ranks(2).run(_wrap_and_tie, stage)


def _two_towers() -> None:
    """Only one part of a model is partitioned: nothing is refused, and the other stays as it is."""
    model = nn.ModuleList([dsgraph.partition(_net(), keep_whole_below=9), _net()])
    runs = [torch.compile(each, backend="dsgraph", options={"codegen": "eager"}) for each in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(each(torch.randn(3, 6)) for each in runs).backward()
    optimizer.step()
    assert not any(isinstance(param, DTensor) for param in model[1].parameters())


@pytest.mark.filterwarnings("ignore:this model was not partitioned")
def test_what_stands_beside_a_partitioned_part_may_be_plain(ranks):
    ranks(2).run(_two_towers)


def _name(dtype: torch.dtype) -> str:
    return f"of_{dtype}".replace(".", "_")


def _equalise_buffers() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    dtypes = (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.uint16)
    for dtype in dtypes:
        model.register_buffer(_name(dtype), torch.tensor([[0, 1], [rank, 1 - rank]]).to(dtype).t())
    model.register_buffer("hidden", torch.tensor(float(rank)), persistent=False)
    model[1].running_mean += rank
    before = dict(model.named_buffers())
    dsgraph.partition(model, keep_whole_below=0)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    for dtype in dtypes:
        expected = torch.tensor([[0, 1], [0, 1]]).to(dtype).t()
        assert torch.equal(model.get_buffer(_name(dtype)), expected), dtype
    assert model.hidden.item() == 0
    assert model[1].running_mean.tolist() == [0.0] * 4

    model[1].running_mean += rank  # ranks see other batches: what they have learnt of them is their own
    model.append(nn.BatchNorm1d(4))
    model[2].running_var += rank
    dsgraph.partition(model)
    assert model[1].running_mean.tolist() == [float(rank)] * 4
    assert model[2].running_var.tolist() == [1.0] * 4


def test_buffers_take_the_first_ranks_values(ranks):
    ranks(2).run(_equalise_buffers)


def _differ_in_a_sparse_buffer(value: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(3).mul(1 + value * dist.get_rank()).to_sparse())
    model.register_buffer("unknown", torch.full((), torch.nan).expand(3))
    if value:
        with pytest.raises(dsgraph.RanksDisagreeError, match=r"buffer graph: \[3, 3\] torch.float32, values"):
            dsgraph.partition(model)
        assert type(model.weight) is nn.Parameter, "nothing was changed"
    else:
        dsgraph.partition(model)


@pytest.mark.parametrize("value", [0, 1])
def test_buffers_that_cannot_be_sent_must_be_equal(ranks, value):
    ranks(2).run(_differ_in_a_sparse_buffer, value)


def _copy_and_save(stage: int) -> None:
    torch._dynamo.reset()
    model = dsgraph.partition(_net(), stage=stage, keep_whole_below=9)
    runs = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    batch = torch.randn(3, 6)
    for backward in (runs, model):
        model.zero_grad()
        backward(batch).backward()
        for param in model.parameters():
            file = io.BytesIO()
            torch.save(param.grad, file)
            file.seek(0)
            assert torch.equal(torch.load(file, weights_only=False).to_local(), param.grad.to_local())
        for copied in (copy.deepcopy(model), copy.deepcopy(runs)):
            for mine, theirs in zip(model.parameters(), copied.parameters(), strict=True):
                assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
            with torch.no_grad():
                for param in copied.parameters():
                    param.zero_()
            assert copied(batch) != runs(batch)
        assert copy.copy(model).head is model.head
    with pytest.raises(
        dsgraph.PartitionError, match=r"Linear is part of a partitioned model.*cannot be pickled.*state_dict"
    ):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_copies_after_a_step(ranks, stage):
    ranks(2).run(_copy_and_save, stage)


def _llama(*, tied: bool) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=11, tie_word_embeddings=tied, num_key_value_heads=1, **sizes)
    )


def _resize(stage: int, tied: bool) -> None:
    alone, model = _llama(tied=tied), dsgraph.partition(_llama(tied=tied), stage=stage, keep_whole_below=12)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dsgraph.PartitionError, match="SGD was made before resize_token_embeddings and holds"):
        model.resize_token_embeddings(14)
    assert model.get_input_embeddings().weight.shape == (11, 8), "nothing was changed"
    before = list(model.parameters())
    model.tie_weights()  # as they are already, or not at all
    assert [*map(id, model.parameters())] == [*map(id, before)]
    if not tied:
        with pytest.raises(dsgraph.PartitionError, match=r"cannot be registered in a module \(Linear, as 'weight'\)"):
            model.lm_head.weight = model.get_input_embeddings().weight
    del early
    for each, seed in ((alone, 1), (model, 1 + dist.get_rank())):
        torch.manual_seed(seed)
        assert each.resize_token_embeddings(14, mean_resizing=False).num_embeddings == 14
    _check(model, alone)
    assert (model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]) == tied
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    tokens = torch.arange(14).view(2, 7)
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        each(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    _check(model, alone)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_token_embeddings_are_resized(ranks, stage, tied):
    ranks(2).run(_resize, stage, tied)
