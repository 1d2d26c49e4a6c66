"""The plan by which blocks are gathered before they run, and their gradients reduced afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from dsgraph.compat.autograd import at_end_of_backward, compiled_backwards, running_backward
from dsgraph.compat.tensors import unseen_by_modes
from dsgraph.ranks.model_operations import ModelOperations
from dsgraph.utils.errors import PartitionError

from .block_calls import Call, Reads
from .block_copies import BlockCopies
from .block_limit import BlockLimit
from .block_reads import RunningReduction

_NONE = -1


@dataclass(eq=False)
class BlockPlan:
    """The order of a model's blocks in the last forward, by which the next block is gathered while one computes.

    In the backward the gradients of a block are reduced while the next one computes. The order is a prediction. A block
    that was not predicted is gathered when it runs; what nobody used is released at the end of the backward, or before
    the block's next run.

    Attributes:
        operations: The model's operations, which ranks compare.
        blocks: All blocks.
        forwards: Number of forwards so far.
        gathers_ahead: False if the graphs were compiled with `overlap_comm=False`: nothing is gathered before its use,
            and reductions are finished at once.
        in_step: True while further micro-batches of a step follow, for which a limit leaves memory.
        limit: The state of a `memory_limit`. Memory that it leaves holds copies of the last blocks for the backward.
    """

    operations: ModelOperations
    blocks: list[BlockCopies] = field(default_factory=list)
    forwards: int = 0
    gathers_ahead: bool = True
    in_step: bool = False
    limit: BlockLimit = field(default_factory=BlockLimit)
    _order: tuple[BlockCopies, ...] = ()
    _staying: frozenset[BlockCopies] = frozenset()
    _seen: list[BlockCopies] = field(default_factory=list)
    _calls: list[tuple[BlockCopies, Call]] = field(default_factory=list)
    _backward: int = _NONE
    _ending: Callable[[], object | None] = lambda: None
    _reductions: list[RunningReduction] = field(default_factory=list)

    def ran(self) -> list[BlockCopies]:
        """Return the blocks that ran as frames in the last forward, in their order."""
        return list(self._seen or self._order)

    def staying(self) -> list[BlockCopies]:
        """Return the blocks whose copies stay from the forward to the backward, in their order."""
        return [block for block in self.ran() if block in self._staying] or self.ran()[-1:]

    @unseen_by_modes
    def begin(self, block: BlockCopies) -> None:
        """Gather a block's copies before its forward, and start to gather the next block's. `end` follows always."""
        self._calls.append((block, Call()))
        block.begin_call()
        recomputes = running_backward() != _NONE
        if recomputes:
            self._enter_backward()
        else:
            self._enter(block)
        if block.is_read:
            block.start()
            self._start_neighbour(block, -1 if recomputes else 1)
        block.hand_out()

    @unseen_by_modes
    def end(self, block: BlockCopies, *, failed: bool = False) -> None:
        """Release a block's copies after its forward, unless the backward begins with them."""
        _, call = self._calls.pop()
        block.end_call()
        if running_backward() != _NONE:  # a recomputation, which a checkpoint may end by an exception
            return
        if failed:
            self._abandon()
            return
        block.is_read = call.has_read
        if not block.running:
            block.is_kept = call.graphs > 0 and block in self._staying
            if not block.is_kept:
                block.release()

    @unseen_by_modes
    def run_graph(
        self, numbers: Sequence[int], compiled: Callable[..., Any], args: Sequence[Any], *, waits: bool
    ) -> Any:
        """Call a compiled graph that reads copies of blocks; its backward finds them gathered again.

        Args:
            numbers: Numbers of the inputs that are such copies.
            compiled: The compiled graph.
            args: Its inputs.
            waits: True unless the graph waits for each copy itself.
        """
        given, entries = list(args), [args[number].dsgraph_entry for number in numbers]
        blocks: list[BlockCopies] = list(dict.fromkeys(args[number].dsgraph_block for number in numbers))
        for block in blocks:
            block.start()
            if waits:
                block.wait()
        for number, entry in zip(numbers, entries, strict=True):
            if given[number] is not entry.block_read:
                given[number] = entry.block_copy  # a new one, if the parameter was converted
        outputs = compiled(*given)
        kept = [entry for block in blocks for entry in block.keep_for_readers(outputs)]
        for block, call in self._calls:
            call.has_read |= block in blocks
        read = zip(numbers, entries, strict=True)
        self._watch_backward(blocks, tuple(given[number] for number, entry in read if entry not in kept), outputs)
        for block in blocks:
            if not block.running and running_backward() == _NONE:
                block.release()
        return outputs

    @unseen_by_modes
    def finish_later(self, reductions: Sequence[RunningReduction]) -> None:
        """Take over the reductions of a block's gradients, and finish those of the block before."""
        self._enter_backward()
        earlier = len(self._reductions)
        self._reductions.extend(reductions)
        self._finish_reductions(earlier if self.gathers_ahead else len(self._reductions))

    def note_spare(self, spare: int) -> None:
        """Note the bytes of a limit that a step leaves on all ranks."""
        known = self.limit.spare
        self.limit.spare = spare if known is None else min(known, spare)
        self._choose_staying()

    def note_step(self, stepped: Collection[int]) -> None:
        """Note that an optimizer has stepped on the parameters with these ids."""
        for block in self.blocks:
            block.note_step(stepped)
        self.release_held()

    def release_held(self) -> None:
        """Release the copies that were kept for micro-batches that do not follow."""
        for block in self.blocks:
            if block.is_held:
                block.release()

    def clear(self) -> None:
        """Remove all blocks, which are about to be defined again."""
        for block in self.blocks:
            block.abandon()
            block.forget()
        self.blocks, self._order, self._seen, self._staying = [], (), [], frozenset()

    def _enter(self, block: BlockCopies) -> None:
        """Note that a forward has come to a block."""
        if self._backward != _NONE:
            self._abandon()  # the backward raised an error
        if self._seen == [block]:  # the forward before this one may have ended after its first block
            self.forwards += 1
        elif block in self._seen[:-1]:
            self._next_forward()
        if block not in self._seen:
            self._seen.append(block)
        if block.is_kept:
            block.release()

    def _watch_backward(self, blocks: Sequence[BlockCopies], copies: tuple[Tensor, ...], outputs: Any) -> None:
        running = {block: call for block, call in self._calls if block in blocks}
        for node in compiled_backwards(outputs):
            reads = Reads({block: running.get(block) or Call() for block in blocks}, copies)
            for call in reads.calls.values():
                call.graphs += 1
            node.register_prehook(lambda _, reads=reads: self._before_backward(reads))
            node.register_hook(lambda *_, reads=reads: self._after_backward(reads))

    @unseen_by_modes
    def _before_backward(self, reads: Reads) -> None:
        self._enter_backward()
        for block in reads.calls:
            block.start()
        for block in reads.calls:
            self._start_neighbour(block, -1)
            block.wait()
        for copy in reads.copies:  # to read released memory would end the process
            if not copy.untyped_storage().nbytes():
                name = copy.dsgraph_entry.name  # type: ignore[attr-defined]
                raise PartitionError(
                    f"the backward reads parameter {name!r} as it was before it was converted (dtype or device), and "
                    "its memory was released: convert the model before the forward"
                )

    @unseen_by_modes
    def _after_backward(self, reads: Reads) -> None:
        for block, call in reads.calls.items():
            call.graphs -= 1
            if call.graphs <= 0 and not block.running:
                self._release(block)

    def _enter_backward(self) -> None:
        if self._backward != _NONE and self._ending() is None:
            self._abandon()  # it raised an error: torch has dropped what it would have called at its end
        if self._backward == _NONE:
            self._note_order()
            self._backward = running_backward()
            ending = partial(self._end_backward)
            self._ending = weakref.ref(ending)
            at_end_of_backward(ending)

    def _finish_reductions(self, number: int) -> None:
        """Finish the reductions that were started first."""
        for _ in range(number):
            self._reductions.pop(0).add()

    @unseen_by_modes
    def _end_backward(self) -> None:
        self._backward = _NONE
        self._next_forward()
        try:
            self._finish_reductions(len(self._reductions))
        finally:
            for block in self.blocks:
                if not block.running:
                    self._release(block)

    def _release(self, block: BlockCopies) -> None:
        """Release a block's copies after its backward, unless the spare memory holds them for the next micro-batch."""
        stays = block.is_present and block in self._staying and block is not self._order[-1]
        block.is_kept, block.is_held = False, self.in_step and stays
        if not block.is_held:
            block.release()

    def _abandon(self) -> None:
        """Release everything after an error in a forward or backward."""
        self._backward = _NONE
        self._next_forward()
        for reduction in self._reductions:
            with suppress(RuntimeError):
                reduction.finish()
        self._reductions = []
        for block in self.blocks:
            if not block.running:
                block.abandon()

    def _next_forward(self) -> None:
        self._note_order()
        self.forwards += 1

    def _note_order(self) -> None:
        if self._seen:
            before, self._order, self._seen = self._order, tuple(self._seen), []
            if before != self._order:
                self._choose_staying()

    def _choose_staying(self) -> None:
        """Choose the blocks whose copies stay for the backward: the last one, and those before it that fit."""
        sizes = accumulate(block.memory().copies for block in self._order[-2::-1])
        spare = self.limit.spare or 0
        number = sum(size <= spare for size in sizes) if spare else 0
        self._staying = frozenset(self._order[-1 - number :])
        stay = self._order[-1 - number : -1] if number else ()
        self.limit.staying = sum(block.memory().copies for block in stay)

    def _start_neighbour(self, block: BlockCopies, step: int) -> None:
        if not self.gathers_ahead or block not in self._order:
            return
        number = self._order.index(block) + step
        if 0 <= number < len(self._order):
            neighbour = self._order[number]
            if neighbour.is_read and not neighbour.running:
                neighbour.start()

    def __getstate__(self) -> dict[str, Any]:
        idle: dict[str, Any] = {
            "_order": (),
            "_staying": frozenset(),
            "_seen": [],
            "_calls": [],
            "forwards": 0,
            "_backward": _NONE,
            "_reductions": [],
        }
        return {**self.__dict__, **idle}
