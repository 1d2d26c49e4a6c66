"""Writers of the scalars of each step: TensorBoard, CSV files, JSON lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.utils.errors import ConfigError


class Monitor(Protocol):
    """A writer of the scalars of each step, on the first rank."""

    def write(self, scalars: Mapping[str, float], *, step: int, samples: int) -> None:
        """Write the scalars of a step.

        Args:
            scalars: By their names, which are DeepSpeed's.
            step: Steps so far.
            samples: Samples so far: the x axis, as in DeepSpeed.
        """

    def close(self) -> None:
        """Close the writer."""


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Start a file in `folder`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, scalars: Mapping[str, float], *, step: int, samples: int) -> None:
        """Add the scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


class CsvFiles:
    """One file a scalar, `Train_Samples_lr.csv`, with lines of samples and value."""

    def __init__(self, folder: Path) -> None:
        """Append to the files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def write(self, scalars: Mapping[str, float], *, step: int, samples: int) -> None:
        """Add a line to each file."""
        for name, value in scalars.items():
            path = self._folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(("step", name.rpartition("/")[2]))
                rows.writerow((samples, value))

    def close(self) -> None:
        """Do nothing: each line is in its file already."""


class JsonLines:
    """One JSON object a step; a value that is not finite is null."""

    def __init__(self, path: Path) -> None:
        """Open the file, to append to it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, scalars: Mapping[str, float], *, step: int, samples: int) -> None:
        """Add a line."""
        said = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps({"step": step, "samples": samples, **said}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_monitors(config: EngineConfig) -> None:
    """Refuse a configuration whose scalars cannot be written; every rank calls it.

    Raises:
        ConfigError: TensorBoard is asked for and not installed.
    """
    if config.tensorboard.enabled and find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard.enabled: TensorBoard is not installed: pip install dsgraph[tensorboard], or remove the section"
        )


def monitors_of(config: EngineConfig) -> list[Monitor]:
    """Return the writers of a configuration; the first rank calls it.

    Raises:
        ConfigError: A file or a folder cannot be written.
    """
    found: list[Monitor] = []
    try:
        for section, kind in ((config.tensorboard, TensorBoard), (config.csv_monitor, CsvFiles)):
            if section.enabled:
                found.append(kind(Path(section.output_path) / section.job_name))
        if config.dsgraph.metrics_file is not None:
            found.append(JsonLines(Path(config.dsgraph.metrics_file)))
    except OSError as error:
        raise ConfigError(f"config: {error.filename} cannot be written: {error.strerror}") from error
    return found
