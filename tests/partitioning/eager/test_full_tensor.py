"""Parameters that are read outside any forward: the classes that they are accepted as, and refused operations."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dsgraph
from dsgraph.partitioning.eager.full_tensor import FullTensor

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(params=[0, 1, 3])
def model(request) -> nn.Module:
    torch.manual_seed(0)
    return dsgraph.partition(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage=request.param, keep_whole_below=0)


def _shards(model: nn.Module) -> Tensor:
    return next(model.parameters()).detach().full_tensor().clone()


def test_it_computes_as_a_plain_tensor(model):
    weight = model[0].weight
    assert type(weight @ weight) is Tensor and type(weight.clone()) is Tensor
    assert weight.is_leaf and weight.grad_fn is None and weight.requires_grad
    assert not isinstance(weight, nn.Parameter), "it must not be registered in another module"
    assert repr(weight).startswith("tensor(")
    (gradient,) = torch.autograd.grad(weight.square().sum(), weight)
    assert torch.equal(gradient, 2 * weight)
    assert torch.equal(torch.func.grad(lambda w: w.square().sum())(weight.detach()), 2 * weight)


def test_inside_a_forward_it_computes_as_a_plain_tensor(model):
    seen = []
    model[0].register_forward_pre_hook(lambda module, _: seen.extend([module.weight, module.weight * 2]))
    model(torch.ones(1, 4))
    assert not isinstance(seen[0], (FullTensor, DTensor)) and type(seen[1]) is Tensor
    assert isinstance(model[0].weight, FullTensor)


def test_it_is_copied_and_saved_as_one_process_would(model):
    copied = copy.deepcopy(model[0].weight)
    assert type(copied) is nn.Parameter and torch.equal(copied, model[0].weight)
    file = io.BytesIO()
    torch.save({"weight": model[0].weight, "data": model[0].weight.data}, file)
    file.seek(0)
    assert {name: type(value) for name, value in torch.load(file).items()} == {"weight": Tensor, "data": Tensor}


def test_notes_stand_on_the_parameter(model):
    model[0].weight.no_decay = True
    assert next(model.parameters()).no_decay and model[0].weight.no_decay


def test_writes_in_inference_mode(model):
    before = _shards(model)
    with torch.inference_mode():
        model[0].weight.mul_(2)
    assert torch.equal(_shards(model), 2 * before)


@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w[0].zero_(), lambda w: torch.mul(w, 2, out=w)])
def test_what_torch_refuses_of_a_parameter_is_refused(model, write):
    before = _shards(model)
    with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad|out=\.\.\. arguments"):
        write(model[0].weight)
    assert torch.equal(_shards(model), before)


def test_a_parameter_is_copied_into_another(model):
    model[0].weight.data.copy_(model[1].weight)
    first, _, second, _ = (param.full_tensor() for param in model.parameters())
    assert torch.equal(first, second)
    assert model[0].weight.requires_grad and model[0].weight.is_leaf


def _set_data(weight: Tensor, value: Tensor) -> None:
    weight.data = value


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda w: torch.optim.SGD([w], lr=0.1),
            r"an optimizer was given parameter 'weight' of Linear.*parameters\(\)",
        ),
        (nn.Parameter, "nn.Parameter.* got the memory of parameter 'weight' of Linear.*clone"),
        (lambda w: nn.Parameter(w.data), "nn.Parameter.* got the memory of parameter 'weight' of Linear.*clone"),
        (lambda w: _set_data(w, torch.ones(3)), r"parameter 'weight' of Linear is \[4, 4\]; \[3\] cannot be written"),
        (lambda w: _set_data(w, w.data.half()), "is torch.float32; torch.float16 cannot be written"),
        (lambda w: _set_data(w.data, w.data), "part of it cannot be replaced"),
        (lambda w: w.data.resize_(2, 8), "resize_ would give it another shape"),
        (lambda w: w.data.set_(torch.ones(4, 4)), "cannot be given other memory"),
        (lambda w: w.data.view(torch.int32).zero_(), "a view of it in another dtype"),
        (lambda w: w.register_post_accumulate_grad_hook(print), r"not parameter 'weight' of Linear: take.*parameters"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(model, use, said):
    before = _shards(model)
    with pytest.raises(dsgraph.PartitionError, match=said):
        use(model[0].weight)
    assert torch.equal(_shards(model), before)


def test_tying_after_partition_is_refused(model):
    with pytest.raises(dsgraph.PartitionError, match=r"cannot be registered in a module \(Linear, as 'weight'\)"):
        model[1].weight = model[0].weight


@pytest.mark.parametrize("backend", ["dsgraph", "eager"])
def test_a_compiled_function_writes(model, backend):
    def double(weight: Tensor) -> Tensor:
        with torch.no_grad():
            weight.mul_(2)
        return weight.sum()

    before = _shards(model)
    options = {"options": {"codegen": "eager"}} if backend == "dsgraph" else {}
    result = torch.compile(double, backend=backend, **options)(model[0].weight)
    assert torch.equal(_shards(model), 2 * before)
    torch.testing.assert_close(result, 2 * before.sum())
    result.backward()
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))


def test_a_compiled_function_takes_it_whole(model):
    loss = torch.compile(
        lambda x, w: (x @ w).square().sum(), backend="dsgraph", fullgraph=True, options={"codegen": "eager"}
    )
    x = torch.ones(2, 4)
    torch.testing.assert_close(loss(x, model[0].weight), (x @ _shards(model)).square().sum())
    assert isinstance(model[0].weight, FullTensor)


class Writing(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "view":
            self.weight.detach()[0].mul_(2)
        elif self.how == "row":
            with torch.no_grad():
                self.weight[0] = 1
        elif self.how == "init":
            nn.init.normal_(self.weight)
        own = self.weight * 1
        own.mul_(2)  # of its own
        return super().forward(x) + own.sum()


@pytest.mark.covering
@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("how", ["data", "view", "row", "init"])
def test_a_captured_forward_that_writes_is_refused(stage, how, accumulating):
    model = dsgraph.partition(Writing(how), stage=stage, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    with pytest.raises(dsgraph.PartitionError, match=r"^the forward writes to parameter 'weight' \(.*test_full_tensor"):
        if accumulating:
            with dsgraph.accumulate(model):
                compiled(torch.ones(1, 4))
        else:
            compiled(torch.ones(1, 4))


def test_a_forward_may_write_to_what_it_has_computed():
    model = dsgraph.partition(Writing("nothing"), keep_whole_below=0)
    x = torch.ones(1, 4)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    torch.testing.assert_close(compiled(x), model(x))
