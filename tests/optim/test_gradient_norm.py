"""The global gradient norm of parts, against that of the full gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dsgraph.optim.gradient_norm import GradientPart, LocalGradients
from dsgraph.ranks.mesh import axis_group

pytestmark = pytest.mark.distributed


def _full() -> dict[str, torch.Tensor]:
    """Gradients by what they are split over."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"": (3,), "dp": (5, 2), "tp": (4, 6), "dp tp": (4, 4), "tied": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _local(dtype: torch.dtype) -> LocalGradients:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = {axis: axis_group(mesh[axis], 0).group_name for axis in ("dp", "tp")}
    parts = []
    for over, full in _full().items():
        own, axes = full.to(dtype), [axis for axis in ("dp", "tp") if axis in over]
        for dim, axis in enumerate(axes):
            own = own.chunk(2, dim)[mesh.get_local_rank(axis)].clone()
        split = [names["dp"]] if over == "tied" else [names[axis] for axis in axes]
        is_counted = over != "tied" or mesh.get_local_rank("dp") == 1
        parts.append(GradientPart(own, frozenset(split), is_counted))
    return LocalGradients(parts, (names["dp"], names["tp"]), torch.device("cpu"))


def _norms(dtype: torch.dtype) -> tuple[float, float]:
    return _local(dtype).norm(), math.sqrt(
        sum(float(full.to(dtype).double().square().sum()) for full in _full().values())
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_norm_is_that_of_the_full_gradients(ranks, dtype):
    for norm, expected in ranks(4).run(_norms, dtype):
        assert norm == pytest.approx(expected, rel=1e-6)


def _clip() -> tuple[float, float, float]:
    local = _local(torch.float32)
    full_norm = local.norm()
    before = local.unscale_and_clip(scale=2.0, max_norm=0.5)
    return full_norm, before, local.norm()


def test_gradients_are_unscaled_and_clipped(ranks):
    for full_norm, before, after in ranks(4).run(_clip):
        assert before == pytest.approx(full_norm / 2, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)


def _one_is_not_finite() -> bool:
    local = _local(torch.float32)
    kept = [part.grad.clone() for part in local.parts]
    if dist.get_rank() == 1:
        local.parts[3].grad.fill_(float("inf"))
        kept[3].fill_(float("inf"))
    norm = local.unscale_and_clip(scale=2.0, max_norm=0.5)
    same = all(torch.equal(one, part.grad) for one, part in zip(kept, local.parts, strict=True))
    return same and not math.isfinite(norm)


def test_a_gradient_that_is_not_finite_leaves_all_as_they_are(ranks):
    assert all(ranks(4).run(_one_is_not_finite))
