"""Roles of a mesh's dimensions, and placements of parameters on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dsgraph
from dsgraph.passes import AxisRole, MeshAxis
from dsgraph.passes.ir.parameters import shard_axis
from dsgraph.ranks.mesh import mesh_axes, shard_dim


@pytest.mark.parametrize(
    ("shape", "names", "roles"),
    [
        ((8,), None, ["shard"]),
        ((8,), ("data",), ["shard"]),
        ((2, 4), None, ["replicate", "shard"]),
        ((2, 4), ("dp_replicate", "dp_shard"), ["replicate", "shard"]),
        ((2, 4), ("shard", "replicate"), ["replicate", "shard"]),  # names are the user's
        ((2, 2, 2), None, ["replicate", "replicate", "shard"]),  # of somebody else's tensor
    ],
)
def test_roles_are_told_by_position(fake_ranks, shape, names, roles):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    axes = mesh_axes(mesh)
    assert [axis.role.value for axis in axes] == roles
    assert [axis.name for axis in axes] == list(names or roles)
    assert [axis.size for axis in axes] == list(shape)
    assert shard_dim(mesh) == len(shape) - 1


def test_rows_are_split_over_the_shard_axis_and_averaged_over_the_others(fake_ranks):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    outer, shard = mesh_axes(mesh)
    model = dsgraph.partition(nn.Linear(8, 16), mesh, keep_whole_below=32)
    weight, bias = model._dsgraph.partition.parameters
    assert (weight.spec.group, weight.spec.outer_groups) == (shard.group, (outer.group,))
    assert (bias.spec.group, bias.spec.outer_groups) == ("", (outer.group, shard.group))
    assert tuple(weight.param.placements) == (Replicate(), Shard(0))
    assert tuple(bias.param.placements) == (Replicate(), Replicate())
    assert weight.param.to_local().shape == torch.Size([4, 8])


def test_an_axis_is_found_by_its_role():
    axes = [MeshAxis("a", 2, "0", "gloo", AxisRole.SHARD), MeshAxis("b", 4, "1", "gloo", AxisRole.TENSOR)]
    assert shard_axis(axes) is axes[0]
    assert shard_axis(axes[1:]) is None
