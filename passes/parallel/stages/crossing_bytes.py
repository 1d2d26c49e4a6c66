"""The bytes that cross a cut between two stages, at each place of a graph, and the places where no cut is legal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor
from torch.fx import Node

from dsgraph.passes.analysis.sizes import tensor_bytes

from .root_values import regions

_WRITERS = frozenset({"setitem", "iadd", "isub", "imul", "itruediv"})


def crossing_bytes(
    order: Sequence[Node], repeated: Collection[Node], together: Iterable[Collection[Node]] = ()
) -> list[float]:
    """Return for each place the bytes that cross a cut before that node; infinite if a cut is illegal."""
    at = {node: place for place, node in enumerate(order)}
    crossing = [0.0] * (len(order) + 1)
    for span in regions(order[0].graph) if order else ():
        for node in span[1:]:
            crossing[at.get(node, 0)] = math.inf
    for nodes in together:
        places = sorted(at[node] for node in nodes if node in at)
        for between in range(places[0] + 1, places[-1] + 1) if places else ():
            crossing[between] = math.inf
    for place, node in enumerate(order):
        name = getattr(node.target, "__name__", str(node.target))
        readers = () if node in repeated else node.users
        last = max((at.get(user, len(order) - 1) for user in readers), default=place)
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        size = float(tensor_bytes(node.meta["val"])) if is_tensor else math.inf
        for between in range(place + 1, last + 1):
            crossing[between] += size
        if _writes(name):  # what it writes to must not have been sent before
            own = (at[read] for read in node.all_input_nodes if read in at and read not in repeated)
            first = min(own, default=place)
            for between in range(first + 1, place + 1):
                crossing[between] = math.inf
    return crossing


def _writes(name: str) -> bool:
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))
