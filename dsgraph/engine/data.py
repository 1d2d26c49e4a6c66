"""A dataset becomes a loader of this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dsgraph.errors import ConfigError


class RankLoader(DataLoader[Any]):
    """Micro-batches of one rank: each epoch draws another order, the same on all ranks, of which each takes its share.

    Samples that do not fill a micro-batch on every rank are left out of an epoch.
    """

    def __init__(
        self, dataset: Dataset[Any], *, micro: int, ranks: int, rank: int, collate_fn: Callable[..., Any] | None = None
    ) -> None:
        """Makes the loader.

        Args:
            dataset: Has a length.
            micro: Samples of a micro-batch.
            ranks: Data-parallel ranks.
            rank: Which of them this is.
            collate_fn: Makes a batch of samples; None: torch's own way.

        Raises:
            ConfigError: The dataset has no length, or fewer samples than one micro-batch of every rank takes.
        """
        if not isinstance(dataset, Sized):
            raise ConfigError(
                f"training_data is a {type(dataset).__name__} without a length: pass a loader of your own"
            )
        if len(dataset) < micro * ranks:
            raise ConfigError(
                f"training_data has {len(dataset)} samples; a micro-batch of {micro} on each of {ranks} ranks takes "
                f"{micro * ranks}"
            )
        self._order: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank, shuffle=True, drop_last=True)
        super().__init__(dataset, batch_size=micro, sampler=self._order, collate_fn=collate_fn, drop_last=True)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        finally:
            self._order.set_epoch(self._order.epoch + 1)
