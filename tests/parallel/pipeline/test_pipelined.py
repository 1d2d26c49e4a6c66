"""A pipeline of one rank: failed steps, arguments that are refused, and the measured link in the choice of cuts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from dsgraph.compiler.costs.host import device_name, host_name
from dsgraph.compiler.costs.store import save
from dsgraph.utils.errors import OptionError, PartitionError
from tests.compiler.costs.records import LINK, calibration

pytestmark = pytest.mark.usefixtures("one_rank")

COUNT, ROWS = 4, 2


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, COUNT * ROWS, 4, generator=torch.Generator().manual_seed(step))
    return x, y


class _Fails:
    """A function that raises an error at one of its calls.

    Attributes:
        left: Number of calls until then; below 0: none does.
    """

    left = -1

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("a bad row")


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("1F1B", {}),
        ("GPipe", {"data_parallel": True, "param_dtype": torch.float64}),
        ("1F1B", {"data_parallel": True, "param_dtype": torch.float64, "zero_stage": 3, "keep_whole_below": 0}),
        ("ZBVZeroBubble", {}),
    ],
)
def test_a_step_that_fails_leaves_the_gradients_of_the_step_before(schedule, how, where):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    given: dict[str, Any] = {**how, **({"data_parallel": mesh["dp"]} if "data_parallel" in how else {})}
    model, fails = _model(), _Fails()
    alone = copy.deepcopy(model)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "forward":
            fails()
        return F.mse_loss(output, target)

    if where == "backward":
        model[0].bias.register_hook(lambda grad: fails())
    piped = dsgraph.pipeline(
        model, mesh["pp"], (torch.ones(ROWS, 4),), microbatches=COUNT, loss_fn=loss_fn, schedule=schedule, **given
    )
    for step in (0, 1, 2):
        fails.left = 3 if step == 1 else -1
        x, y = _batch(step)
        if step == 1:
            with pytest.raises((ValueError, RuntimeError), match=r"a bad row|Failed to run stage backward"):
                piped.step(x, target=y)
        else:
            piped.step(x, target=y)
            F.mse_loss(alone(x), y).backward()
        found = {
            name: getattr(param.grad, "full_tensor", lambda g=param.grad: g)()
            for name, param in piped.named_parameters()
        }
        for name, param in alone.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_refused_by_name():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))

    def split(**given: Any) -> Any:
        return dsgraph.pipeline(_model(), mesh["pp"], (torch.ones(ROWS, 4),), microbatches=COUNT, **given)

    for dtype in ("bf16", torch.int8):
        with pytest.raises(
            PartitionError, match=r"param_dtype is .*; it takes a floating-point dtype of 16 bits or more"
        ):
            split(param_dtype=dtype, data_parallel=mesh["dp"])
    for given in ({"param_dtype": torch.bfloat16}, {"zero_stage": 1}, {"keep_whole_below": 0}):
        with pytest.raises(OptionError, match=f"{next(iter(given))} is .* needs data_parallel=.* one rank is enough"):
            split(**given)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, target_rows: Tensor, scale: float = 1.0) -> Tensor:
        loss = F.mse_loss(self.linear(x) * scale, target_rows)
        return loss if self.training else loss.detach()


def test_arguments_that_differ_from_the_example_are_named():
    x, y = _batch(0)
    piped = dsgraph.pipeline(
        *(_Scaled(), init_device_mesh("cpu", (1,)), (x[:ROWS], y[:ROWS])),
        example_kwargs={"scale": 2.0},
        microbatches=COUNT,
    )
    cases = (
        (
            (x, None),
            {"scale": 2.0},
            r"argument 'target_rows' is None, .* are torch.float32 of shape \(8, 4\): pass such",
        ),
        ((x, 1), {"scale": 2.0}, r"argument 'target_rows' is 1, "),
        ((x[1:], y), {"scale": 2.0}, r"argument 'x' is torch.float32 of shape \(7, 4\), .* drop the uneven rest"),
        ((x, y), {"scale": torch.ones(())}, r"argument number 2 is .*, and the example's was 2.0: pass that value"),
        ((x, y), {"scale": 3.0}, "pass that value, or, for a number that changes, a tensor without dimensions"),
        (
            (x[:ROWS], y[:ROWS]),
            {"scale": 2.0},
            "the shapes of the example, .* and there are 4: pass the complete batch",
        ),
        ((x, y), {}, "pass the same arguments"),
        ((x, y), {"scale": 2.0, "target": 5}, "the model returns its loss: leave target out"),
    )
    for args, kwargs, problem in cases:
        for call in (piped.step, piped.evaluate):
            with pytest.raises(OptionError, match=rf"(?s)^pipeline\.{call.__name__}: .*{problem}"):
                call(*args, **kwargs)
    assert float(piped.evaluate(x, y, scale=2.0)) == pytest.approx(float(piped.step(x, y, scale=2.0)), rel=1e-6)


def test_a_number_that_changes_is_a_tensor():
    x, y = _batch(0)
    given = (x[:ROWS], y[:ROWS], torch.ones(()))
    piped = dsgraph.pipeline(_Scaled(), init_device_mesh("cpu", (1,)), given, microbatches=COUNT)
    losses = [float(piped.step(x, torch.zeros_like(y), torch.tensor(scale))) for scale in (1.0, 2.0)]
    assert losses[1] == pytest.approx(4 * losses[0], rel=1e-5)
    with pytest.raises(OptionError, match=r"argument 'scale' is torch.float32 of shape \(4,\), and .* shape \(\)"):
        piped.step(x, y, torch.ones(COUNT))
    rows = piped.evaluate(x, y[:ROWS], torch.ones(()))  # the same targets for each micro-batch
    assert float(rows) == pytest.approx(float(piped.evaluate(x, y[:ROWS].repeat(COUNT, 1), torch.ones(()))), rel=1e-6)


class _Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() if self.training else self.linear(x)


def test_a_model_without_a_loss_in_eval_is_refused():
    piped = dsgraph.pipeline(_Logits(), init_device_mesh("cpu", (1,)), (torch.ones(ROWS, 4),), microbatches=COUNT)
    with pytest.raises(OptionError, match=r"the model in eval\(\) returns no floating-point scalar"):
        piped.evaluate(torch.ones(COUNT * ROWS, 4))


class _Wide(nn.Module):
    """A model with a float32 buffer, which it reads in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.linear, self.way = nn.LayerNorm(4), nn.Linear(4, 4), way
        self.statistics = nn.BatchNorm1d(4)
        self.register_buffer("places", torch.linspace(0, 1, 4))
        self.register_buffer("rows", torch.arange(ROWS))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "norm":
            return self.norm(x + self.places).mean()
        if self.way == "statistics":
            return self.statistics(self.linear(x)).mean()
        if self.way == "product":
            return self.linear((x * self.places).sin()).mean()
        if self.way == "made":
            return self.linear(x + torch.ones(4)).mean()
        if self.way == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.linear(x + self.places).mean()
        if self.way == "mask":
            heads = self.linear(x).view(1, 1, ROWS, 4)
            return F.scaled_dot_product_attention(heads, heads, heads, self.places[:ROWS].expand(ROWS, ROWS)).mean()
        if self.way == "matrix":
            return torch.matmul(self.linear(x)[None], self.places.expand(1, 4, 4)).mean()
        if self.way == "entropy":
            return F.cross_entropy(self.linear(x), self.rows, self.places)
        if self.way == "probabilities":
            return F.cross_entropy(input=self.linear(x), target=self.places.expand(ROWS, 4))
        if self.way == "keys":
            heads = self.linear(x)[None]
            return F.scaled_dot_product_attention(query=heads, key=self.places.expand(1, 4, 4), value=heads).mean()
        if self.way.startswith("write"):
            written, rows = self.linear(x), self.rows
            if self.way == "write adds":
                written = written.index_add(0, rows, self.places.expand(ROWS, 4))
            elif self.way == "write rows":
                written[rows] = self.places.expand(ROWS, 4)
            elif self.way == "write list":
                written[:, [0, 1]] = self.places[:2]
            elif self.way == "write slice":
                written[0] = self.places
            else:
                written[rows > 0] = self.places[1]
            return written.mean()
        if self.way == "scale":
            return torch.einsum("bd,d->bd", self.linear(x), self.places).mean()
        return (self.linear(x + self.places.to(x.dtype)) * self.places).mean()


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("norm", r"layer_norm in 'norm' gets torch.float32 and torch.bfloat16: buffer 'places' is torch.float32"),
        ("product", r"linear in 'linear' gets torch.float32 and torch.bfloat16: buffer 'places' is torch.float32"),
        ("statistics", r"batch_norm in 'statistics' gets .*: buffer 'statistics.running_mean' is torch.float32"),
        ("made", r"linear in 'linear' gets .*: the value 'ones' that the forward makes is torch.float32"),
        ("keys", r"cannot be captured as one graph\. An operator gets two dtypes"),
        ("matrix", r"cannot be captured as one graph\. An operator gets two dtypes"),
        ("entropy", r"cross_entropy\w* in 'the model' gets .*: buffer 'places' is torch.float32"),
        ("write adds", r"index_add in 'the model' gets .*: buffer 'places' is torch.float32"),
        ("write rows", r"setitem in 'the model' gets .*: buffer 'places' is torch.float32"),
        ("write list", r"setitem in 'the model' gets .*: buffer 'places' is torch.float32"),
        *((way, "") for way in ("autocast", "cast", "mask", "scale", "probabilities", "write slice", "write one")),
    ],
)
def test_a_buffer_that_param_dtype_does_not_cast_is_named(way, error):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    x = torch.ones(ROWS, 4)

    def step() -> Tensor:
        given = {"data_parallel": mesh["dp"], "param_dtype": torch.bfloat16}
        return dsgraph.pipeline(_Wide(way), mesh["pp"], (x,), microbatches=COUNT, **given).step(x.repeat(COUNT, 1))

    if not error:
        assert step().isfinite()
        return
    with pytest.raises(PartitionError, match=f"{error}, and param_dtype casts only"):
        step()


@pytest.mark.parametrize(("bytes_per_s", "width"), [(1e12, 400), (1e6, 4)])
def test_cuts_follow_the_measured_link(tmp_path, monkeypatch, bytes_per_s, width):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    link = replace(LINK, kind="all_gather_into_tensor", bytes_per_s=bytes_per_s)
    save(calibration(host=host_name(), device=device_name("cpu"), kernel_s=0.0, links=(link,)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400), nn.Linear(400, 4))
    piped = dsgraph.pipeline(
        *(model, init_device_mesh("cpu", (1,)), (torch.ones(ROWS, 4),)),
        microbatches=COUNT,
        schedule="Interleaved1F1B",
        loss_fn=F.mse_loss,
    )
    assert piped.report.cut_bytes == (4 * ROWS * width,)
