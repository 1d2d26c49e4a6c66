"""A quantized linear layer that several ranks share, and the slice of its weight on each rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsgraph.inductor_ext import slice_of
from dsgraph.inference.slicing_ranks import SlicingRanks
from dsgraph.passes.parallel.slices import Slice
from dsgraph.utils.errors import InferenceError

from .quantized_linear import QuantizedLinear


class SlicedQuantizedLinear(QuantizedLinear):
    """A tensor-parallel quantized layer: `x @ weight.t() + bias` of full `x`, with a slice of the weight on each rank.

    Run eagerly it gathers, or sums over ranks; in compiled graphs `SliceTensors` keeps slices.

    Attributes:
        held: The sliced dimension of the weight (out_features, in_features), and the number of parts.
    """

    def __init__(self, whole: QuantizedLinear, held: Slice, ranks: SlicingRanks) -> None:
        """Keep this rank's slices, without communication.

        Args:
            whole: The layer, which may be on the meta device.
            held: A dimension that `check_slices` accepts.
            ranks: The ranks that share it.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features, self.bits = whole.out_features, whole.in_features, whole.bits
        self.held = held
        self._ranks = ranks
        rank = ranks.mesh.get_local_rank()
        for name, buffer in whole._buffers.items():
            one = slices_of_buffers(whole, held).get(name)
            if one is not None and buffer is not None:
                buffer = slice_of(buffer, one.dim, parts=one.parts, ranks=ranks.count, rank=rank)
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        held, ranks = self.held, self._ranks
        multiply = torch.ops.dsgraph.multiply_sliced_weight
        result: Tensor = multiply(
            x, self.packed, self.scale, self.least, held.dim, held.parts, ranks.count, ranks.group
        )
        return result if self.bias is None else result + self.bias.to(result.dtype)

    def dequantized(self) -> Tensor:
        """Return the weight of all ranks, float32 (out_features, in_features). All of them call it together."""
        held, ranks = self.held, self._ranks
        own = super().dequantized()
        full: Tensor = torch.ops.dsgraph.gather_slices(own, held.dim, held.parts, ranks.count, ranks.group)
        return full


def slices_of_buffers(layer: QuantizedLinear, held: Slice) -> dict[str, Slice]:
    """Return the slices of a layer's buffers, if its weight is sliced like this; other buffers are replicated.

    Rows of the weight have scales of their own, and so have groups of 4 bits; a row of 8 bits has one scale for all
    ranks.
    """
    scaled = ("packed", "scale", "least") if held.dim == 0 or layer.least is not None else ("packed",)
    return {name: held for name in scaled if layer._buffers[name] is not None}


def check_slices(name: str, held: Slice, *, inputs: int, group: int, ranks: int) -> None:
    """Check that ranks can share a layer.

    Args:
        name: Name of the layer.
        held: The slice of its weight (out_features, in_features).
        inputs: Number of columns of the weight.
        group: Number of neighbours in a row that share a scale; 0: all of the row.
        ranks: Number of ranks that share it.

    Raises:
        InferenceError: A group would be split between ranks.
    """
    if held.dim == 1 and group and inputs // group % (held.parts * ranks):
        raise InferenceError(
            f"init_inference: {name!r} has {inputs // group} groups of {group} inputs, which {ranks} ranks cannot "
            f"share evenly: call dsgraph.quantize with a smaller group, or with skip=[{name!r}]"
        )
