"""A model that its own code has sliced, under ZeRO, by a Megatron-style object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dsgraph
from dsgraph.utils.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.distributed

WIDTH, INNER, ROWS = 8, 16, 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS // 2,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
    "zero_optimization": {"stage": 2, "param_persistence_threshold": 0},
}


class _IntoSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _OutOfSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Sliced(nn.Module):
    """Two products as Megatron has them: each rank of a group has a slice of `up` and `down`, and all of `norm`."""

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(INNER, WIDTH) / 4, torch.randn(WIDTH, INNER) / 4
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank].clone())
        for param in (self.up, self.down) if ranks > 1 else ():
            param.tensor_model_parallel = True
        self.group, self.is_sliced = group, ranks > 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = _IntoSlices.apply(h, self.group) if self.is_sliced else h
        h = torch.tanh(h @ self.up.T) @ self.down.T
        h = _OutOfSlices.apply(h, self.group) if self.is_sliced else h
        return (x + h).pow(2).mean()


class Mpu:
    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> Any:
        return self._mesh.get_group("dp")

    def get_model_parallel_group(self) -> Any:
        return self._mesh.get_group("tp")


def _batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(engine: Any, rank: int, ranks: int) -> list[float]:
    found = []
    for step in range(3):
        loss = engine(_batch(step).chunk(ranks)[rank])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found += [float(total) / dist.get_world_size(), engine.get_global_grad_norm()]
    return found


def _sliced(compiles: bool) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Sliced(mesh.get_group("tp"), mesh["tp"].get_local_rank(), 2)
    config = {**CONFIG, "dsgraph": {"codegen": "eager", "compile": compiles}}
    engine, *_ = dsgraph.initialize(model=model, config=config, mpu=Mpu(mesh))
    found = _train(engine, mesh["dp"].get_local_rank(), 2)
    with pytest.raises(CheckpointError, match="checkpoints with mpu= are not supported"):
        engine.save_checkpoint("nowhere")
    return found


def _alone() -> list[float]:
    config = {**CONFIG, "train_micro_batch_size_per_gpu": ROWS, "dsgraph": {"compile": False}}
    engine, *_ = dsgraph.initialize(model=Sliced(None, 0, 1), config=config)
    return _train(engine, 0, 1)


LOST = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch loses the gradients: tests/compiler/test_capture.py"
)


@pytest.mark.parametrize("compiles", [pytest.param(False, marks=pytest.mark.full), pytest.param(True, marks=LOST)])
def test_losses_and_norms_are_those_of_one_process(ranks, compiles):
    expected = ranks(1).run(_alone)[0]
    for found in ranks(4).run(_sliced, compiles):
        assert found == pytest.approx(expected, rel=1e-6)


class _Stages(Mpu):
    def get_pipe_parallel_world_size(self) -> int:
        return 2


def _refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for mpu, more, message in (
        (_Stages(mesh), {}, "mpu has 2 pipeline stages"),
        (Mpu(mesh), {"parallel": {"dp": 2}}, "already defines the process groups: remove mesh= and `parallel`"),
        (object(), {}, r"without get_data_parallel_group\(\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            dsgraph.initialize(model=Sliced(None, 0, 1), config={**CONFIG, **more}, mpu=mpu)


def test_what_cannot_be_taken_is_refused(ranks):
    ranks(2).run(_refused)
