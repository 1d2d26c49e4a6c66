"""The loader of this rank's micro-batches, which counts the samples that all ranks have used.

This count and a seeded order determine the next sample on any number of ranks. The state of a loader's workers
(torchdata's `StatefulDataLoader`) would do so only for the same numbers of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dsgraph.utils.errors import ConfigError, EngineError

from .config.read_config import ResolvedConfig

_SEED = 0  # as that of torch's DistributedSampler, whose order this is


class EpochOrder(Sampler[int]):
    """The numbers of the samples that one rank has yet to load in an epoch.

    The order of an epoch is the same on all ranks, and this rank takes one of every `ranks` samples. So the samples of
    a micro-batch of all ranks are neighbours in the order, and the remaining samples are its tail.

    Attributes:
        epoch: From 0; each has an order of its own.
        drawn: Number of its samples that all ranks together have used.
    """

    def __init__(self, samples: int, *, micro: int, ranks: int, rank: int, drop_last: bool) -> None:
        """Start with the first epoch; see `RankLoader` for the arguments."""
        self.epoch = self.drawn = 0
        self._samples, self._ranks, self._rank, self._drop_last = samples, ranks, rank, drop_last
        self._each = micro * ranks

    def __len__(self) -> int:
        """Return the number of samples of this rank in a full epoch."""
        if self._drop_last:
            return self._samples // self._each * self._each // self._ranks
        return -(-self._samples // self._ranks)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(_SEED + self.epoch))
        left = order[self.drawn :]
        if self._drop_last:
            left = left[: len(left) // self._each * self._each]
        else:  # some come twice, so that all ranks have as many
            missing = -len(left) % self._ranks
            left = torch.cat([left, order.repeat(-(-missing // self._samples))[:missing]])
        return iter(left[self._rank :: self._ranks].tolist())

    @property
    def seed(self) -> int:
        """A number that is unique to the rank and the position in the order: the seed of workers."""
        return (self.epoch * self._samples + self.drawn) * self._ranks + self._rank

    def advance(self) -> None:
        """Advance by one micro-batch on all ranks."""
        self.drawn = min(self.drawn + self._each, self._samples)

    def leave_finished_epoch(self) -> None:
        """Go to the next epoch, if nothing is left of this one."""
        left = self._samples - self.drawn
        if left < (self._each if self._drop_last else 1):
            self.epoch, self.drawn = self.epoch + 1, 0

    def why_not(self, state: Mapping[str, Any]) -> str:
        """Return why the order cannot continue from a state; empty if it can."""
        if state["samples"] != self._samples or state["seed"] != _SEED:
            return f"its loader had {state['samples']} samples in another order, this one has {self._samples}"
        return ""

    def state_dict(self) -> dict[str, int]:
        """Return the position in the order, valid for any number of ranks."""
        return {"epoch": self.epoch, "drawn": self.drawn, "samples": self._samples, "seed": _SEED}


class RankLoader(DataLoader[Any]):
    """The micro-batches of one rank: its share of each epoch, whose order is the same on all ranks.

    One loop runs at a time; a new one ends the one before. Micro-batches that a loop has returned count as used: a loop
    that begins in the middle of an epoch continues with the rest of it, after a `break` as after `load_state_dict`.
    """

    @classmethod
    def of(
        cls, dataset: Dataset[Any] | None, resolved: ResolvedConfig, place: tuple[int, int], collate_fn: Any
    ) -> RankLoader | None:
        """Return the loader of a configuration; None without a dataset. `place`: see `TrainingState.data_place`."""
        if dataset is None:
            return None
        rank, ranks = place
        return cls(
            dataset,
            micro=resolved.batch.micro,
            ranks=ranks,
            rank=rank,
            collate_fn=collate_fn,
            drop_last=resolved.config.dataloader_drop_last,
            num_workers=resolved.config.dsgraph.num_workers,
        )

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro: int,
        ranks: int,
        rank: int,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
    ) -> None:
        """Create the loader.

        Args:
            dataset: A dataset with a length.
            micro: Samples of a micro-batch.
            ranks: Data-parallel ranks.
            rank: Number of this rank among them.
            collate_fn: Makes a batch of samples; None: torch's default.
            drop_last: True drops samples of an epoch that do not fill a micro-batch on every rank. Otherwise the last
                micro-batch is smaller, and some samples are repeated so that all ranks have equally many.
            num_workers: Number of processes that load data for this rank; 0: its own process loads.

        Raises:
            ConfigError: The dataset has no length, or too few samples for a micro-batch.
        """
        if not isinstance(dataset, Sized):
            raise ConfigError(
                f"training_data is a {type(dataset).__name__} without a length: pass a loader of your own"
            )
        if len(dataset) == 0 or (drop_last and len(dataset) < micro * ranks):
            raise ConfigError(
                f"training_data has {len(dataset)} samples; a micro-batch of {micro} on each of {ranks} ranks takes "
                f"{micro * ranks}"
            )
        self._order = EpochOrder(len(dataset), micro=micro, ranks=ranks, rank=rank, drop_last=drop_last)
        self._open: Generator[Any, None, None] | None = None
        super().__init__(
            dataset,
            batch_size=micro,
            sampler=self._order,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, so that a loop leaves the random numbers of the model alone
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.end_loop()
        self._open = self._batches()
        return self._open

    def next_batch(self) -> Any:
        """Return the next micro-batch of the running loop, or of a new one if there is none.

        Epochs follow each other.
        """
        for batch in self._open or ():
            return batch
        return next(iter(self))

    def state_dict(self) -> dict[str, int]:
        """Return the position, as JSON values; any number of ranks can continue from there."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the position of another loader of the same dataset; a running loop is ended.

        Args:
            state: A result of its `state_dict`; None keeps the position.

        Raises:
            ConfigError: The state belongs to another dataset.
        """
        problem = self.why_not(state)
        if problem:
            raise ConfigError(f"load_state_dict: {problem}")
        if state is not None:
            self.end_loop()
            self._order.epoch, self._order.drawn = int(state["epoch"]), int(state["drawn"])

    def why_not(self, state: Mapping[str, Any] | None) -> str:
        """Return why `load_state_dict` would refuse a state; empty if it would not."""
        return "" if state is None else self._order.why_not(state)

    def end_loop(self) -> None:
        """End the running loop and its workers; the position stays."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _batches(self) -> Generator[Any, None, None]:
        order = self._order
        order.leave_finished_epoch()
        assert self.generator is not None
        self.generator.manual_seed(order.seed)
        for batch in super().__iter__():
            order.advance()
            yield batch
        order.leave_finished_epoch()


def batches_of(loader: RankLoader | None) -> Iterator[Any]:
    """Yield the micro-batches of a loader, epoch after epoch, from its current position.

    Raises:
        EngineError: There is no loader.
    """
    if loader is None:
        raise EngineError("train_batch: no data: pass an iterator, or training_data to initialize")
    return iter(loader.next_batch, object())


def next_of_step(data: Iterator[Any], number: int, count: int, *, call: str = "train_batch") -> Any:
    """Return the next micro-batch of a step.

    Args:
        data: Yields one micro-batch at a time.
        number: Number of micro-batches of the step so far.
        count: Number of micro-batches in a step.
        call: The method of the engine that was called, for errors.

    Raises:
        EngineError: The data ends within the step.
        StopIteration: It ends before the step.
    """
    try:
        return next(data)
    except StopIteration:
        if not number:
            raise
        dropped = "The step was dropped" if call == "train_batch" else "They were not evaluated"
        raise EngineError(
            f"{call}: the iterator ended after micro-batch {number} of {count}. {dropped}. Pass an iterator with "
            "enough data"
        ) from None
