"""Random numbers of a pipeline: by one seed, every layout draws the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.parallel.pipeline.stage_chain import NO_TECHNIQUES, Techniques
from tests.models import VOCAB

pytestmark = pytest.mark.distributed

COUNT, ROWS, TIME = 4, 2, 8


class Block(nn.Module):
    """Attention and layers with dropout, noise and a branch that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))
        if self.training:
            kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8) / 0.8
            x = x + checkpoint(self._noisy, x, use_reentrant=False) * kept
        return x

    def _noisy(self, x: Tensor) -> Tensor:
        return torch.tanh(F.dropout(x, 0.1)) * torch.rand_like(x) + 0.1 * torch.randn(x.shape)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, VOCAB, (2, COUNT * ROWS, TIME), generator=generator)
    return x, y


def _train(
    pp: int, dp: int, *, schedule: str, options: dict[str, Any] | None, techniques: Techniques = NO_TECHNIQUES
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses of three steps, and this rank's gradients of the last one."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // pp, pp), mesh_dim_names=("dp", "pp"))
    copies = {"data_parallel": mesh["dp"]} if dp > 1 else {}
    (x, y), losses = _batch(0), []
    piped = dsgraph.pipeline(
        *(Model(), mesh["pp"], (x[:ROWS], y[:ROWS])),
        microbatches=COUNT // dp,
        schedule=schedule,
        options=options,
        techniques=techniques,
        **copies,
    )
    torch.manual_seed(1)
    part = mesh["dp"].get_local_rank() if dp > 1 else 0
    for _ in range(3):
        piped.zero_grad()
        losses.append(float(piped.step(x.chunk(dp)[part], y.chunk(dp)[part])))
    return losses, {name: value.grad.clone() for name, value in piped.named_parameters()}


def _compare(pp: int, dp: int, **how: Any) -> None:
    losses, gradients = _train(1, 1, schedule="GPipe", options=None)
    assert len({round(loss, 5) for loss in losses}) == 3, "each step draws others"
    found, mine = _train(pp, dp, **how)
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in mine.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, gradients[name], rtol=1e-4, atol=1e-6)


_EAGER = {"codegen": "eager"}


@pytest.mark.parametrize(
    ("schedule", "options", "techniques"),
    [
        ("ZBVZeroBubble", None, NO_TECHNIQUES),
        ("1F1B", {**_EAGER, "memory_limit": "78kB"}, NO_TECHNIQUES),
        pytest.param("1F1B", _EAGER, Techniques(blocks="auto"), marks=pytest.mark.full),
        pytest.param("Interleaved1F1B", _EAGER, NO_TECHNIQUES, marks=pytest.mark.full),
        pytest.param("1F1B", {"codegen": "inductor"}, NO_TECHNIQUES, marks=[pytest.mark.full, pytest.mark.inductor]),
    ],
)
def test_stages_draw_as_one_does(ranks, schedule, options, techniques):
    ranks(2).run(_compare, 2, 1, schedule=schedule, options=options, techniques=techniques)


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.full)])
def test_more_ranks_draw_as_one_does(ranks, pp, dp):
    ranks(4).run(_compare, pp, dp, schedule="1F1B", options=None)


class Plain(nn.Module):
    """Pairs of layers that `tensor_parallel` splits, with dropout between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = (nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + self.dropout(down(self.dropout(torch.relu(up(x)))))
        return x.square().mean()


def _with_slices() -> None:
    x, found = torch.randn(COUNT * ROWS, 16, generator=torch.Generator().manual_seed(2)), []
    for layout in ({"dp": 4}, {"pp": 2, "tp": 2}):
        torch.manual_seed(0)
        part = dist.get_rank() if "dp" in layout else 0
        count = COUNT // layout.get("dp", 1)
        piped = dsgraph.parallelize(Plain(), (x[:ROWS],), zero_stage=0, microbatches=count, **layout)
        torch.manual_seed(1)
        found.append([float(piped.step(x.chunk(layout.get("dp", 1))[part])) for _ in range(2)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_slices_draw_as_one_rank_does(ranks):
    ranks(4).run(_with_slices)


def _resumed(folder: str) -> None:
    torch.manual_seed(0)
    (x, y), mesh = _batch(0), init_device_mesh("cpu", (2,))
    piped = dsgraph.pipeline(Model(), mesh, (x[:ROWS], y[:ROWS]), microbatches=COUNT)
    piped.step(x, y)
    piped.save_checkpoint(folder, torch.optim.SGD(piped.parameters()))
    losses = [float(piped.step(x, y)) for _ in range(2)]
    torch.manual_seed(5)
    again = dsgraph.pipeline(Model(), mesh, (x[:ROWS], y[:ROWS]), microbatches=COUNT)
    again.load_checkpoint(folder, torch.optim.SGD(again.parameters()))
    assert [float(again.step(x, y)) for _ in range(2)] == losses and losses[0] != losses[1]


def test_a_checkpoint_continues_with_the_same_random_numbers(ranks, tmp_path):
    ranks(2).run(_resumed, str(tmp_path))
