"""Text that every machine with Python has: the source of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Folders left out: other people's packages, tests, and tables that are data rather than code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
LIMIT = 16_000_000  # bytes
HELD_OUT_EVERY = 20  # of the files, one in so many is never trained on
LEAST_HELD_OUT = 10_000  # bytes; a window must be shorter


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes held out. Both `[bytes]` uint8."""

    train: Tensor
    held_out: Tensor

    def batch(self, step: int, *, size: int, time: int, seed: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the batch of one step: tokens and targets, `[size / world, time]` int64.

        The windows of the whole batch are drawn from the seed and the step alone, and dealt to the ranks: a resumed run
        goes on with the data that it would have seen, on any number of ranks.
        """
        # Torch's generator on the CPU reads the low 32 bits of a seed.
        generator = torch.Generator().manual_seed((1_000_003 * seed + step) % 2**32)
        starts = torch.randint(0, len(self.train) - time, (size,), generator=generator)
        return _windows(self.train, starts[rank::world], time)

    def held_out_batch(
        self, index: int, count: int, *, size: int, time: int, rank: int, world: int
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's part of held-out batch `index` of `count`.

        Their windows are spread evenly over the bytes.
        """
        starts = torch.linspace(0, len(self.held_out) - time - 1, size * count, dtype=torch.float64).long()
        return _windows(self.held_out, starts[index::count][rank::world], time)


def _windows(data: Tensor, starts: Tensor, time: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(time + 1)].long()  # [starts, time + 1]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def standard_library() -> Text:
    """Read the source of the running interpreter's standard library; the split is by file.

    Raises:
        FileNotFoundError: This Python came without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(paths):
        if len(train) + len(held_out) >= LIMIT:
            break
        try:
            source = path.read_bytes()
        except OSError:
            continue  # not ours to read
        (held_out if number % HELD_OUT_EVERY == 0 else train).extend(source)
    if len(held_out) < LEAST_HELD_OUT:
        raise FileNotFoundError(f"no Python source to train on in {root}: this interpreter came without it")
    return Text(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))
