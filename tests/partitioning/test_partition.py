from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dsgraph
from tests.models import build

pytestmark = pytest.mark.usefixtures("one_rank")


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def test_nothing_else_about_the_model_changes():
    model = build("tied")
    names, text, keys = [n for n, _ in model.named_parameters()], repr(model), list(model.state_dict())
    model.embedding.weight.no_decay = True
    buffers = dict(model.named_buffers())
    assert dsgraph.partition(model, keep_whole_below=20) is model
    assert [n for n, _ in model.named_parameters()] == names
    assert repr(model) == text
    assert list(model.state_dict()) == keys
    assert dict(model.named_buffers()) == buffers
    params = dict(model.named_parameters())
    assert all(isinstance(param, DTensor) and isinstance(param, nn.Parameter) for param in params.values())
    assert params["embedding.weight"].placements == (Shard(0),)
    assert params["norm.weight"].placements == (Replicate(),), "16 elements are below 20"
    assert params["embedding.weight"].no_decay
    assert model.embedding._parameters["weight"] is model.head._parameters["weight"], "still tied"
    assert isinstance(model.embedding, nn.Embedding)


def test_stages_place_parameters():
    for stage, placement in ((0, Replicate()), (1, Shard(0)), (2, Shard(0)), (3, Shard(0))):
        model = dsgraph.partition(_net(), stage=stage, keep_whole_below=0)
        assert {param.placements for param in model.parameters()} == {(placement,)}


def test_scalars_and_empty_parameters_stay_whole():
    model = dsgraph.partition(build("uneven"), keep_whole_below=0)
    whole = {name for name, param in model.named_parameters() if param.placements == (Replicate(),)}
    assert whole == {"scalar", "empty"}


def test_integers_are_not_cast():
    model = _net()
    model.register_parameter("table", nn.Parameter(torch.arange(8), requires_grad=False))
    dsgraph.partition(model, keep_whole_below=0, param_dtype=torch.bfloat16)
    assert model.table.dtype is torch.int64
    assert model[0].weight.dtype is torch.bfloat16
    assert model[0]._parameters["weight"].dtype is torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage is 4; ZeRO stages are 0, 1, 2 and 3"),
        ({"stage": "3"}, "stage is '3'"),
        ({"stage": True}, "stage is True"),
        ({"stage": 3.0}, "stage is 3.0"),
        ({"param_dtype": torch.int8}, "param_dtype is torch.int8; it takes a floating-point dtype"),
        ({"param_dtype": torch.float8_e4m3fn}, "param_dtype is torch.float8_e4m3fn; .* of 16 bits or more"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype is 'bf16'"),
        ({"keep_whole_below": -1}, "keep_whole_below is -1"),
        ({"keep_whole_below": True}, "keep_whole_below is True"),
        ({"mesh": 2}, "mesh is 2; it takes a DeviceMesh"),
    ],
)
def test_wrong_arguments(arguments, message):
    model = _net()
    with pytest.raises(dsgraph.PartitionError, match=message):
        dsgraph.partition(model, **arguments)
    assert type(model[0].weight) is nn.Parameter, "nothing was changed"


def test_a_mesh_of_three_dimensions_is_refused():
    mesh = init_device_mesh("cpu", (1, 1, 1))
    with pytest.raises(dsgraph.PartitionError, match=r"mesh has 3 dimensions \(1, 1, 1\)"):
        dsgraph.partition(_net(), mesh)


def test_a_mesh_of_another_device_is_refused(monkeypatch):
    mesh = init_device_mesh("cpu", (1,))
    mesh._device_type = "cuda"
    if mesh.device_type != "cuda":
        pytest.fail("DeviceMesh keeps its device type elsewhere now")
    with pytest.raises(dsgraph.PartitionError, match="mesh is on 'cuda', the model's parameters are on 'cpu'"):
        dsgraph.partition(_net(), mesh)


def _partitioned_otherwise():
    return dsgraph.partition(_net(), keep_whole_below=3)


def _partitioned_apart():
    return nn.Sequential(*(dsgraph.partition(_net(), keep_whole_below=0) for _ in range(2)))


def _amid_a_step():
    model = dsgraph.partition(_net(), keep_whole_below=0, stage=1)
    with dsgraph.accumulate(model):
        model(torch.randn(1, 4)).sum().backward()
    return model


def _compiled():
    return torch.compile(_net())


def _ddp():
    return nn.parallel.DistributedDataParallel(_net())


def _fsdp():
    return torch.distributed.fsdp.FullyShardedDataParallel(_net(), device_id=torch.device("cpu"))


def _with_max_norm():
    return nn.Sequential(_net(), nn.Embedding(3, 4, max_norm=1.0))


def _with_sparse_gradients():
    return nn.Sequential(_net(), nn.EmbeddingBag(3, 4, sparse=True))


def _scripted():
    return torch.jit.script(_net())


def _lazy():
    return nn.Sequential(nn.LazyLinear(3))


def _sparse():
    model = _net()
    model.register_parameter("sparse", nn.Parameter(torch.eye(3).to_sparse()))
    return model


def _complex():
    model = _net()
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    return model


def _float8():
    model = _net()
    model.register_parameter("packed", nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False))
    return model


def _released():
    model = nn.Sequential(_net(), nn.Linear(2, 2))
    model[1].weight.untyped_storage().resize_(0)
    return model


def _with_gradient():
    model = _net()
    model(torch.randn(1, 4)).sum().backward()
    return model


def _hooked():
    model = _net()
    model[1].bias.register_hook(lambda grad: grad)
    return model


def _distributed_already():
    from torch.distributed.fsdp import fully_shard

    model = _net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def _hidden():
    model = _net()
    model.shortcut = [model[1].weight]
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_partitioned_otherwise, r"is partitioned already, with keep_whole_below=3.*leave keep_whole_below=0 out"),
        (_partitioned_apart, "holds 2 modules that were partitioned apart"),
        (_amid_a_step, "partition during a step of micro-batches, whose gradients would be lost"),
        (_with_max_norm, r"module '1' \(Embedding\) has max_norm=1.0: its forward writes to the weight"),
        (_with_sparse_gradients, r"module '1' \(EmbeddingBag\) has sparse=True"),
        (
            _fsdp,
            "is a FullyShardedDataParallel, which splits parameters itself: partition the module inside it",
        ),
        (_compiled, "compiled already: call dsgraph.partition first"),
        (_ddp, "averages gradients itself"),
        (_scripted, "is a ScriptModule"),
        (_lazy, r"parameter '0.weight' has no shape yet"),
        (_sparse, "parameter 'sparse' has layout torch.sparse_coo"),
        (_complex, "parameter 'phase' is complex"),
        (_float8, "parameter 'packed' is of dtype torch.float8_e4m3fn, which collectives do not take"),
        (_released, "parameter '1.weight' has no memory of its own"),
        (_with_gradient, "parameter '0.weight' has a gradient.*zero_grad"),
        (_hooked, "parameter '1.bias' has hooks"),
        (_distributed_already, "parameter '0.weight' is a DTensor already"),
        (_hidden, r"module '' \(Sequential\) holds parameter '1.weight' in its attribute 'shortcut' as well"),
        (lambda: 3, "takes a torch.nn.Module, found int"),
    ],
)
def test_what_cannot_be_partitioned_is_refused_by_name(make, message):
    with pytest.raises(dsgraph.PartitionError, match=message):
        dsgraph.partition(make(), keep_whole_below=0)


class _Final(nn.Linear):
    def __init_subclass__(cls):
        raise TypeError("_Final has no subclasses")


def _snapshot(model):
    modules = [
        (type(m), dict(m._parameters), set(vars(m)), dict(m._load_state_dict_pre_hooks)) for m in model.modules()
    ]
    return modules, [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("extends", [False, True])
def test_a_failure_at_the_last_module_leaves_the_model_as_it_was(extends):
    model = nn.Sequential(_net(), nn.BatchNorm1d(2))
    if extends:
        dsgraph.partition(model, stage=1, keep_whole_below=0)
    model.append(nn.Linear(2, 3)).append(_Final(3, 3))
    modules, buffers = _snapshot(model)
    with pytest.raises(TypeError, match="has no subclasses"):
        dsgraph.partition(model, stage=1, keep_whole_below=0)
    now, buffers_now = _snapshot(model)
    assert now == modules
    assert all(map(torch.equal, buffers, buffers_now))
    del model[3]
    assert dsgraph.partition(model, stage=1, keep_whole_below=0)(torch.ones(2, 4)).shape == (2, 3)


def test_an_optimizer_made_before_is_refused():
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        dsgraph.PartitionError, match=r"AdamW was made before partition and holds 4 .*Make the optimizer after"
    ):
        dsgraph.partition(model)
    del optimizer
    dsgraph.partition(model)


def test_other_optimizers_do_not_matter():
    other = torch.optim.SGD(_net().parameters(), lr=0.1)
    dsgraph.partition(_net())
    assert len(other.param_groups) == 1


def test_an_optimizer_that_the_collector_has_cleared_does_not_matter():
    cleared = torch.optim.SGD(_net().parameters(), lr=0.1)
    vars(cleared).clear()  # what the collector does first; another thread may see it then
    dsgraph.partition(_net())


@pytest.mark.parametrize("call", [dsgraph.accumulate, dsgraph.discard])
def test_steps_are_of_modules(call):
    takes = pytest.raises(dsgraph.PartitionError, match=f"{call.__name__} takes a torch.nn.Module, found list")
    with takes, call([1]):
        pass


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_second_derivatives_in_parameters_are_refused(stage):
    model = dsgraph.partition(_net(), stage=stage, keep_whole_below=0)
    loss = model(torch.randn(3, 4)).tanh().sum()
    with pytest.raises(NotImplementedError, match="second derivatives in the parameters of a partitioned model"):
        gradients = torch.autograd.grad(
            loss, list(model.parameters()), create_graph=True
        )  # torch 2.11 loses their graph
        sum(gradient.pow(2).sum() for gradient in gradients).backward()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_of_an_attribute_is_refused_by_name(stage):
    model = dsgraph.partition(_net(), stage=stage, keep_whole_below=0)
    loss = model(torch.randn(3, 4)).tanh().sum()
    name, param = list(model.named_parameters())[-1]
    holder, _, attribute = name.rpartition(".")
    for allow_unused in (False, True):
        with pytest.raises(dsgraph.GradientError, match=f"got parameter '{name}' as an attribute"):
            read = getattr(model.get_submodule(holder), attribute)
            torch.autograd.grad(loss, [read], retain_graph=True, allow_unused=allow_unused)
    (found,) = torch.autograd.grad(loss, param, retain_graph=True)
    loss.backward()
    assert torch.equal(found.full_tensor(), param.grad.full_tensor())
    read = getattr(model.get_submodule(holder), attribute)
    (own,) = torch.autograd.grad(read.square().sum(), read)
    assert torch.equal(own, 2 * read)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_second_derivatives_in_inputs_are_those_of_the_plain_model(stage):
    torch.manual_seed(0)
    plain, given = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(3, 4)
    model = dsgraph.partition(copy.deepcopy(plain), stage=stage, keep_whole_below=0)
    for each in (plain, model):  # a gradient penalty
        x = given.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_partitioning_again_changes_nothing_where_nothing_is_new():
    model = dsgraph.partition(_net(), stage=1, keep_whole_below=0)
    before, kinds = list(model.parameters()), [type(module) for module in model.modules()]
    assert dsgraph.partition(model) is model
    assert dsgraph.partition(model, before[0].device_mesh, stage=1, keep_whole_below=0) is model
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize(("name", "value"), [("stage", 3), ("param_dtype", torch.bfloat16), ("keep_whole_below", 1)])
def test_what_is_new_is_partitioned_alike(name, value):
    model = dsgraph.partition(_net(), stage=1, keep_whole_below=0)
    model[1] = nn.Linear(8, 3)
    with pytest.raises(dsgraph.PartitionError, match=f"partitioned already, with {name}=.*leave {name}={value} out"):
        dsgraph.partition(model, **{name: value})
    assert type(model[1].weight) is nn.Parameter, "nothing was changed"


def test_a_model_that_shares_modules_with_a_partitioned_one():
    model = dsgraph.partition(_net(), keep_whole_below=0)
    other = nn.Sequential(model[0], nn.Linear(8, 3))
    with pytest.raises(dsgraph.PartitionError, match="Sequential shares modules with a Sequential that is partitioned"):
        dsgraph.partition(other)


def test_accumulate_needs_a_partitioned_model():
    with (
        pytest.raises(dsgraph.PartitionError, match="accumulate: no partitioned module in Sequential"),
        dsgraph.accumulate(_net()),
    ):
        pass


@pytest.mark.parametrize(
    ("stage", "reduce_once", "message"),
    [
        (0, False, r"reduce_once is False, .* stage=0, .* locally: leave reduce_once out, or partition with stage=2"),
        (1, False, r"reduce_once is False, .* stage=1, .* locally: leave reduce_once out, or partition with stage=2"),
        (3, True, r"reduce_once is True, .* stage=3, .* it could keep: leave reduce_once out, or .* stage=2"),
        (2, 1, r"reduce_once is 1; it takes True, False or None"),
    ],
)
def test_a_stage_that_cannot_reduce_so_refuses(stage, reduce_once, message):
    model = dsgraph.partition(_net(), stage=stage, keep_whole_below=0)
    with (
        pytest.raises(dsgraph.PartitionError, match=f"accumulate: {message}"),
        dsgraph.accumulate(model, reduce_once=reduce_once),
    ):
        pass
    model(torch.randn(1, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters()), "nothing was changed"


@pytest.mark.parametrize(("stage", "reduce_once"), [(0, True), (1, True), (2, True), (2, False), (3, False)])
def test_what_a_stage_does_anyway_may_be_said(stage, reduce_once):
    model = dsgraph.partition(_net(), stage=stage, keep_whole_below=0)
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        model(torch.randn(1, 4)).sum().backward()
    assert all(bool(param.grad.to_local().isnan().all()) == reduce_once for param in model.parameters())
    if not reduce_once:
        assert all(bool(param.grad.to_local().isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize(("stage", "reduce_once"), [(1, None), (2, True)])
def test_an_early_step_does_not_lose_local_gradients(stage, reduce_once):
    model = dsgraph.partition(_net(), stage=stage, keep_whole_below=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dsgraph.accumulate(model, reduce_once=reduce_once):
        model(torch.randn(1, 4)).sum().backward()
    with pytest.raises(dsgraph.AccumulationError, match=r"parameter '0.weight'.*run the last micro-batch.*outside"):
        optimizer.step()
    model(torch.randn(1, 4)).sum().backward()
    optimizer.step()


def test_a_process_group_is_made_when_there_is_none():
    dist.destroy_process_group()
    model = dsgraph.partition(_net())
    assert dist.get_world_size() == 1
    assert next(model.parameters()).device_mesh.size() == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exported_program_reads_full_parameters(stage):
    model = dsgraph.partition(nn.Linear(3, 2), stage=stage, keep_whole_below=0)
    x = torch.randn(4, 3)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
