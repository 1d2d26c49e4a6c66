"""Systems that train the same model side by side: started one by one, then timed in turns."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.report import MB, Row
from benchmarks.systems import System
from benchmarks.training import Training, Workload
from benchmarks.workers import WorkerError, Workers

PEAK_STEPS = 2
WARM_UP = 1 + PEAK_STEPS + 1  # the first, those that measure memory, the one that counts bytes sent
STEPS_A_TURN = 2


class Comparison:
    """The systems of one run, each in processes of its own.

    Attributes:
        errors: What went wrong, one text a system that failed. The others go on.
    """

    def __init__(
        self,
        workload: Workload,
        counter: Path | None,
        *,
        systems: Mapping[str, System],
        loss_step: int,
        make: Callable[..., Training] = Training,
        place: Callable[[int], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            workload: What all train.
            counter: From `memory.build_counter`.
            systems: Those that may be started, by name.
            loss_step: Which step's loss the rows hold, counted from 1.
            make: What each rank is: a class derived from `Training`.
            place: Where each rank runs, see `Workers`.
        """
        self._workload = workload
        self._counter = counter
        self._systems = systems
        self._loss_step = loss_step
        self._make = make
        self._place = place
        self._groups: dict[str, Workers] = {}
        self._rows: dict[str, Row] = {}
        self._step_times: dict[str, list[float]] = {}
        self.errors: list[str] = []

    def start(self, name: str) -> None:
        """Start a system, alone, and measure all that needs no turns: compiling, memory, bytes sent."""
        system = self._systems[name]
        world = system.world or self._workload.world
        with self._noting_failure(name):
            group = self._groups[name] = Workers(
                name,
                self._make,
                system,
                self._workload,
                self._counter,
                world=world,
                environ=dict(system.environ),
                place=self._place,
            )
            self._step_times[name] = []
            self._rows[name] = {"system": name, "world": world, "step_s": None, **self.warm_up(group), "loss": None}
            print(f"{name}: first step {self._rows[name]['first_step_s']:.2f} s", flush=True)

    def warm_up(self, group: Workers) -> Row:
        """Return the columns of what needs no turns."""
        first = max(group.call("first_step"))
        peaks, sent = group.call("peak_bytes", PEAK_STEPS), group.call("sent_bytes")
        return {
            "peak_mb": None if None in peaks else max(peaks) / MB,
            "first_step_s": first,
            "wire_mb": None if None in sent else max(sent) / MB,
        }

    def take_turns(self, steps: int) -> None:
        """Time `steps` steps of every system, a few at a time, round after round, so that all see the same load."""
        for done in range(0, steps, STEPS_A_TURN):
            for name in list(self._groups):
                with self._noting_failure(name):
                    by_rank = self._groups[name].call("timed_steps", min(STEPS_A_TURN, steps - done))
                    self._step_times[name] += map(max, zip(*by_rank, strict=True))

    def rows(self) -> dict[str, Row]:
        """Return one row a system that got through, by its name."""
        for name in list(self._groups):
            with self._noting_failure(name):
                losses = [rank[self._loss_step - 1] for rank in self._groups[name].call("losses")]
                step = statistics.median(self._step_times[name])
                self._rows[name] |= {"step_s": step, "loss": statistics.fmean(losses)}
        return {name: self._rows[name] for name in self._groups}

    def close(self) -> None:
        """End all processes."""
        for group in self._groups.values():
            group.dismiss()
        for group in self._groups.values():
            group.close()

    @contextlib.contextmanager
    def _noting_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:  # its group has closed itself
            self.errors.append(str(error))
            self._groups.pop(name, None)
