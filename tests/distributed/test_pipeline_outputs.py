"""Outputs of `PipelinedModel.evaluate` on gloo ranks against those of the unsplit model, by micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from dsgraph.compat.tensors import flatten_tree
from tests.distributed.test_tensor_parallel import _build

pytestmark = pytest.mark.distributed

COUNT, ROWS, WIDTH = 4, 2, 8


class Several(nn.Module):
    """Returns its loss among values of both stages, of the inputs alone, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        hidden, mask = [], torch.cumsum((x > 0).long(), -1)
        for layer in self.layers:
            x = torch.tanh(self.dropout(layer(x))) * (mask > 1)
            hidden.append(x)
        return {
            "hidden": (hidden[0], hidden[2]),
            "transposed": x.t().contiguous().t(),
            "loss": F.mse_loss(x, y),
            "aux": x.abs().max().double(),
            "above": (x > 0).sum(),
            "mask": mask,
            "y": y,
            "classes": WIDTH,
            "nothing": None,
        }


class Logits(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _joined(outputs: list[Any], spec: Any) -> list[Any]:
    """Return the leaves of the outputs of micro-batches as one."""
    found = []
    for same in zip(*(flatten_tree(output)[0] for output in outputs), strict=True):
        if not isinstance(same[0], Tensor):
            found.append(same[0])
        elif same[0].ndim:
            found.append(torch.cat(same))
        else:
            together = torch.stack(same)
            found.append(together.mean() if together.is_floating_point() else together)
    assert flatten_tree(outputs[0])[1] == spec
    return found


def _same(loss: Tensor, output: Any, alone: nn.Module, batch: dict[str, Tensor], last: int) -> list[str]:
    """Return what differs from the unsplit model in `eval()`."""
    with torch.no_grad():
        parts = [value.chunk(COUNT) for value in batch.values()]
        expected = [alone.eval()(**dict(zip(batch, part, strict=True))) for part in zip(*parts, strict=True)]
    wrong = []
    if float((loss - sum(each["loss"] for each in expected) / COUNT).abs()) > 1e-6:
        wrong.append("loss")
    if dist.get_rank() != last:
        return wrong + ["output"] * (output is not None)
    leaves, spec = flatten_tree(output)
    for number, (one, other) in enumerate(zip(leaves, _joined(expected, spec), strict=True)):
        is_equal = torch.equal(one, other) if isinstance(other, Tensor) else one == other
        wrong += [] if is_equal and type(one) is type(other) else [f"leaf {number}"]
    return wrong


def _several(schedule: str, options: dict[str, Any] | None, last: int) -> list[str]:
    torch.manual_seed(0)
    model = Several()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, COUNT * ROWS, WIDTH)
    piped = dsgraph.pipeline(
        *(model, init_device_mesh("cpu", (2,)), (x[:ROWS], y[:ROWS])),
        microbatches=COUNT,
        schedule=schedule,
        options=options,
    )
    piped.step(x, y)
    only = piped.evaluate(x, y)
    loss, output = piped.evaluate(x, y, return_outputs=True)
    assert torch.equal(only, loss) and torch.equal(only, piped.evaluate(x, y))
    return _same(loss, output, alone, {"x": x, "y": y}, last)


@pytest.mark.parametrize(
    ("schedule", "options", "last"),
    [
        ("1F1B", None, 1),
        ("ZBVZeroBubble", None, 0),
        pytest.param("GPipe", {"codegen": "eager"}, 1, marks=pytest.mark.full),
    ],
)
def test_the_output_is_that_of_the_model_in_eval(ranks, schedule, options, last):
    assert ranks(2).run(_several, schedule, options, last) == [[], []]


def _llama(tp: int) -> list[str]:
    """Loss, logits, and the states between layers, which later stages relay; a cache that is left out."""
    model, alone = _build("llama"), _build("llama")
    ids = torch.randint(1, 64, (COUNT * ROWS, 8))
    batch = {"input_ids": ids, "labels": ids}
    parts = dsgraph.parallelize(
        *(model, ()),
        example_kwargs={name: value[:ROWS] for name, value in batch.items()} | {"output_hidden_states": True},
        tp=tp,
        pp=2,
        microbatches=COUNT,
    )
    loss, output = parts.evaluate(**batch, output_hidden_states=True, return_outputs=True)
    with torch.no_grad():
        expected = alone.eval()(**batch, output_hidden_states=True)
    wrong = [] if torch.allclose(loss, expected.loss, atol=1e-5) else ["loss"]
    if dist.get_rank() < tp:
        return wrong + ["output"] * (output is not None)
    assert type(output) is type(expected) and torch.allclose(output.loss, loss)
    pairs = zip((output.logits, *output.hidden_states), (expected.logits, *expected.hidden_states), strict=True)
    return wrong + [str(number) for number, (a, b) in enumerate(pairs) if not torch.allclose(a, b, atol=1e-5)]


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_the_output_of_transformers_has_its_class(ranks, tp):
    assert ranks(2 * tp).run(_llama, tp) == [[]] * (2 * tp)


def _without_a_loss(loss_fn: Callable[..., Tensor] | None) -> None:
    torch.manual_seed(0)
    model, x = Logits(), torch.randn(COUNT * ROWS, 4)
    alone = copy.deepcopy(model).eval()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    with torch.no_grad():
        expected = torch.cat([alone(part) for part in x.chunk(COUNT)])
    given: dict[str, Any] = {"microbatches": COUNT, "loss_fn": loss_fn}
    if loss_fn is None:
        with pytest.raises(dsgraph.OptionError, match="bounds a step, and the model returns no loss"):
            dsgraph.pipeline(model, mesh["pp"], (x[:ROWS],), options={"memory_limit": "1GB"}, **given)
    for dtype in (None, torch.float64):
        shards = {"data_parallel": mesh["dp"], "param_dtype": dtype} if dtype else {}
        piped = dsgraph.pipeline(copy.deepcopy(model), mesh["pp"], (x[:ROWS],), **given, **shards)
        loss, output = piped.evaluate(x, return_outputs=True)
        assert loss is None and (output is None) == (dist.get_rank() == 0)
        if output is not None:
            assert torch.equal(output, expected) if dtype is None else torch.allclose(output.float(), expected)
    if loss_fn is None:
        for call, error in ((piped.step, "scalar with a gradient"), (piped.evaluate, "floating-point scalar")):
            with pytest.raises(dsgraph.OptionError, match=rf"^pipeline\.{call.__name__}: .* returns no {error}"):
                call(x)
    else:
        loss, _ = piped.evaluate(x, target=x, return_outputs=True)
        assert torch.allclose(loss, F.mse_loss(expected, x))


@pytest.mark.parametrize("loss_fn", (None, F.mse_loss))
def test_a_model_without_a_loss_is_evaluated(ranks, loss_fn):
    ranks(2).run(_without_a_loss, loss_fn)
