"""Optimizer steps on chunks of parameters while the backward that computes their gradients still runs.

    backward    dY3 | dW3, stored | dY2 | dW2, stored | dY1 ...
    thread                        | read, step, write chunk 3 | read, step, write chunk 2 ...

A chunk is stepped when the op in the graph has stored the last of its gradients (`store_gradient`): autograd's hooks
would report all gradients of one graph at its end. The rest is left to the optimizer's `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from dsgraph.offload.stored_rows import StoredRows
from dsgraph.utils.errors import OffloadError

from .chunks import Chunk

_HELD = (
    "is read or gets another gradient after the backward has updated it: call optimizer.step() first, which ends the "
    "step. Of several backwards a step, only the last one may run inside beside_backward() (the engine: set "
    "gradient_accumulation_steps)"
)

_LOST = "was updated, and others were not, when a backward or a step failed: load the last checkpoint in a new process"


class Numbers:
    """A queue of the numbers of chunks to step; more may be added."""

    def __init__(self, numbers: Iterable[int | None] = ()) -> None:
        """Create a queue with some numbers; `put` adds more."""
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._ended = False
        for number in numbers:
            self._queue.put(number)

    def put(self, number: int | None) -> None:
        """Add a number; None: that was the last."""
        self._queue.put(number)

    def next(self, *, wait: bool) -> int | None:
        """Return the next number; None if there will be none or, without `wait`, if there is none yet."""
        if self._ended:
            return None
        try:
            number = self._queue.get(block=wait)
        except Empty:
            return None
        self._ended = number is None
        return number


class BesideBackward:
    """The chunks that are stepped during one backward.

    Attributes:
        begun: Numbers of the chunks whose step has begun.
        is_listening: True while the backward runs.
    """

    def __init__(self, chunks: Sequence[Chunk], groups: Sequence[Mapping[str, Any]]) -> None:
        """Create the state of a backward that has not begun.

        Args:
            chunks: The chunks of the optimizer.
            groups: Its groups, whose learning rates and the like are used.
        """
        self.begun: list[int] = []
        self.is_listening = False
        self._chunks, self._groups = chunks, groups
        self._numbers = Numbers()
        self._waits_for: dict[int, int] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._stepping: Future[None] | None = None
        self._options = _options(groups)

    @contextmanager
    def listening(self, step: Callable[[Numbers], None]) -> Iterator[None]:
        """Call `step` in a thread, during the block, with the chunks whose gradients arrive."""
        watched = []
        for number, chunk in enumerate(self._chunks):
            trained = self._trained(number)
            if not trained or len(trained) < sum(param.requires_grad for param in chunk.params):
                continue  # gradients of parameters in memory arrive by autograd, at the end
            self._waits_for[number] = len(trained)
            for rows in trained:
                rows.when_arrived = partial(self._arrived, number, step)
            watched += trained
        self.is_listening = True
        try:
            yield
        finally:
            self.is_listening = False
            for rows in watched:
                rows.when_arrived = None
            self._numbers.put(None)

    def _arrived(self, number: int, step: Callable[[Numbers], None]) -> None:
        self._waits_for[number] -= 1
        if self._waits_for[number]:
            return
        for rows in self._trained(number):
            rows.held_for = _HELD
            rows.stepped_during_backward = True
        self.begun.append(number)
        self._numbers.put(number)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsgraph-step")
            self._stepping = self._thread.submit(step, self._numbers)

    def finish(self) -> None:
        """Return when all steps that have begun are done, and the rows may be read again.

        Raises:
            OffloadError: The file could not be read or written; or a gradient or learning rate was changed after its
                use.
        """
        try:
            if self._stepping is not None:
                self._stepping.result()
            self._refuse_changes()
        except Exception:
            self.give_up()
            raise
        self._end(because="")

    def give_up(self) -> None:
        """Stop, and refuse reads of the rows from now on: some are updated, and others are not."""
        if self._stepping is not None:
            self._stepping.exception()
        self._end(because=_LOST)

    def _end(self, because: str) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        for chunk in self._chunks:
            for rows in chunk.stored:
                if rows is not None:
                    rows.held_for = because
                    rows.forget_reads()

    def _refuse_changes(self) -> None:
        changed = ""
        if self.begun and _options(self._groups) != self._options:
            changed = "an option of the optimizer, such as its learning rate,"
        elif not all(rows.holds_gradient_as_stored for number in self.begun for rows in self._trained(number)):
            changed = "a gradient"
        if changed:
            raise OffloadError(
                f"{changed} was changed between the backward and optimizer.step(), and some parameters have been "
                "updated without the change: run the backward outside beside_backward(), and load the last checkpoint"
            )

    def _trained(self, number: int) -> list[StoredRows]:
        chunk = self._chunks[number]
        both = zip(chunk.stored, chunk.params, strict=True)
        return [rows for rows, param in both if rows is not None and param.requires_grad]


def _options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]
