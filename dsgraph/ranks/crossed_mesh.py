"""The mesh of a partitioned tensor-parallel model: ranks that share batches times ranks that share parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph.utils.errors import PartitionError

from .agreement import Agreement
from .mesh import axis_group, mesh_ranks


def crossed_mesh(mesh: DeviceMesh, tensor: DeviceMesh) -> DeviceMesh:
    """Return a mesh over both kinds of ranks; its last dimension are those that share parameters.

    All ranks of both call it together.

    Args:
        mesh: The ranks that hold the same slices, of one or two dimensions.
        tensor: The ranks that share each parameter, of one dimension.

    Raises:
        PartitionError: The two have other ranks in common than this one.
        RanksDisagreeError: They cross otherwise than the axes of one mesh.
    """
    me, data, own = dist.get_rank(), mesh_ranks(mesh), mesh_ranks(tensor)
    if {*data} & {*own} != {me}:
        raise PartitionError(
            f"partition: mesh has ranks {data}, and the model is tensor-parallel over ranks {own}: pass the ranks that "
            "hold the same slices, such as mesh['dp'] of the mesh whose mesh['tp'] tensor_parallel was given"
        )
    for each, other in ((mesh, own), (tensor, data)):
        Agreement.over(each).confirm("cross another mesh", [str([rank - me for rank in other])])
    data_names = mesh.mesh_dim_names or ("replicate", "shard")[-mesh.ndim :]
    tensor_name = (tensor.mesh_dim_names or ("tensor",))[0]
    ranks = torch.tensor([[rank + one - me for one in own] for rank in data])
    return DeviceMesh.from_group(
        [*(axis_group(mesh, dim) for dim in range(mesh.ndim)), axis_group(tensor, 0)],
        mesh.device_type,
        mesh=ranks.view(*mesh.shape, len(own)),
        mesh_dim_names=(*data_names, tensor_name if tensor_name not in data_names else "tensor"),
    )
