"""Checkpoints that are written while training continues: tensors are copied first, and a thread writes the copies.

The threads of all ranks meet in a process group of their own, so that no step waits for them. A program does not end
before its thread has: it is no daemon thread. If writing failed and nobody called `wait`, the exit prints the error.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.joint_failure import all_or_none, reason


@dataclass(eq=False)
class Writing:
    """A checkpoint that is being written.

    Attributes:
        agreement: The ranks that write it.
        doing: Its description in errors: `save checkpoints/global_step10`.
        ended: Done when this rank has finished; contains its error.
    """

    agreement: Agreement
    doing: str
    ended: Future[Any] = field(default_factory=Future)

    def run(self, act: Callable[[], Any]) -> None:
        """Write the checkpoint; called in a separate thread."""
        try:
            act()
        except BaseException as error:  # raised by the caller that waits
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def say_failure(self) -> None:
        """Print at exit that the checkpoint could not be written."""
        error = self.ended.exception()
        if error is not None:
            why = reason(error).removeprefix(f"{self.doing}: ")
            text = f"dsgraph: {self.doing}: {why}; the checkpoint before stays the latest. Call "
            text += "engine.wait_for_checkpoint() at the end of training, before destroy_process_group()"
            print(text, file=sys.stderr, flush=True)


class Writer:
    """A writer of one checkpoint at a time during training. All ranks call its methods at the same points."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writing: Writing | None = None

    def group(self) -> dist.ProcessGroup:
        """Return the process group of the writing threads: of all ranks, over gloo, created at the first call."""
        if self._group is None:
            group = dist.new_group(backend="gloo")
            assert group is not None, "it is of all ranks"
            self._group = group
        return self._group

    def start(self, agreement: Agreement, doing: str, act: Callable[[], Any]) -> None:
        """Run `act` in a thread; the one before must have ended, see `wait`."""
        assert self._writing is None, self._writing
        self._writing = Writing(agreement, doing)
        atexit.register(self._writing.say_failure)  # called when all threads have ended
        threading.Thread(target=self._writing.run, args=(act,), name="dsgraph-checkpoint", daemon=False).start()

    def wait(self) -> None:
        """Return when all ranks have written what was started; at once if nothing was.

        Raises:
            CheckpointError: It failed on a rank; all ranks raise.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            atexit.unregister(writing.say_failure)
            all_or_none(writing.agreement, writing.doing, writing.ended.result)

    def close(self) -> None:
        """Wait, and destroy the process group."""
        try:
            self.wait()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
