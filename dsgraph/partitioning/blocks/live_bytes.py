"""Counts of the memory that exists around repeated blocks, while a step runs on fake tensors."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsgraph.compat.tensors import flatten_tree
from dsgraph.passes.analysis.block_memory import AroundBlocks
from dsgraph.passes.compat import TorchDispatchMode, storage_id


@dataclass
class BlockCall:
    """A call of a block.

    Attributes:
        block: Its name in the model.
        computed: Bytes of all values that it computes.
    """

    block: str
    computed: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that exist outside blocks, while a step runs on fake tensors.

    Full parameters that code around blocks reads are counted until the next block runs, or until the backward reads
    what autograd has saved.

    Attributes:
        calls: The calls of blocks in the forward.
        full: Memory of a sharded parameter of no block -> bytes of the full parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[BlockCall] = []
        self.full: dict[int, int] = {}
        self._live = 0
        self._known: dict[int, Any] = {}
        self._read, self._saved = set[int](), Counter[int]()
        self._most = self._beside = 0
        self._gaps: list[int] = []
        self._inside: list[int] | None = None  # bytes of the results of a block that is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self._inside is not None:
            self._inside += [value.untyped_storage().nbytes() for value in tensors(outputs)]
            return outputs
        self._read.update(key for value in tensors((args, kwargs)) if (key := storage_id(value)) in self.full)
        for value in tensors(outputs):
            self.add(value)
        self._most = max(self._most, self._live + self._parameters(self._read | self._saved.keys()))
        return outputs

    def add(self, value: Tensor) -> None:
        """Count the memory of a tensor for as long as it exists."""
        storage = value.untyped_storage()
        key, size = storage_id(value), storage.nbytes()
        if key in self._known or key in self.full:
            return

        def gone(_: Any) -> None:
            self._live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self._live += size

    def leave_out(self, value: Tensor) -> None:
        """Do not count the memory of a tensor, nor of its views."""
        storage = value.untyped_storage()
        key = storage_id(value)
        self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key, None))

    def save(self, value: Tensor) -> Tensor:
        """Note that autograd saves a tensor outside blocks."""
        key = storage_id(value)
        if key in self.full:
            self._saved[key] += 1
        return value

    def load(self, value: Tensor) -> Tensor:
        """Note that the backward reads a tensor that autograd saved."""
        key = storage_id(value)
        if key in self._saved:
            self._read.add(key)
            self._saved -= Counter([key])
        return value

    def computed_in(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Return the outputs of a block, which is not counted, and the bytes that it computes."""
        self._inside = []
        try:
            outputs = run()
            return outputs, sum(self._inside)
        finally:
            self._inside = None

    def begin_block(self) -> None:
        """Note that a block's forward or backward runs."""
        self._gaps.append(self._most)
        now = self._live + self._parameters(self._saved)
        self._beside = max(self._beside, now)
        self._read.clear()
        self._most = now

    def end_forward(self, outputs: Iterable[Tensor]) -> None:
        """Note that the forward has ended. The program keeps its outputs until the next forward has returned."""
        kept = sum({key: value.untyped_storage().nbytes() for value in outputs if (key := storage_id(value))}.values())
        self._gaps = [size + kept for size in [*self._gaps, self._most]]
        self._beside += kept
        self._most = self._live

    def result(self) -> AroundBlocks:
        """Return what was counted."""
        first, *between, last = [*self._gaps, self._most]
        total = sum(call.computed for call in self.calls)
        computed = {call.block: max(1, call.computed) for call in self.calls}
        return AroundBlocks(
            beside=self._beside,
            between=max(between, default=0),
            before=max(first, last),
            calls=len(self.calls),
            in_flight={block: math.ceil(total / size) for block, size in computed.items()},
        )

    def _parameters(self, keys: Iterable[int]) -> int:
        return sum(self.full[key] for key in keys)


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors among nested tuples, lists and dicts."""
    return [value for value in flatten_tree(values)[0] if is_tensor(value)]


def is_tensor(value: Any) -> bool:
    """Return True for a tensor."""
    return isinstance(value, Tensor)
