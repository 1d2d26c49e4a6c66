"""Storage of calibrations: one file for each host and device, in the user's cache folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsgraph.utils.files import write_whole
from dsgraph.utils.json_records import RecordError

from .calibration_record import CalibrationRecord, from_text, to_text

_ADVICE = "measure anew with `dsgraph calibrate`, or delete it"


class CalibrationError(Exception):
    """A calibration that cannot be read or written.

    Fix: the message names the file and what to do; `dsgraph calibrate` writes a new one.
    """


def folder() -> Path | None:
    """Return `dsgraph/calibration` in XDG_CACHE_HOME or ~/.cache; None for a user who has neither."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not chosen.is_absolute():  # which the XDG specification says to ignore
        try:
            chosen = Path.home() / ".cache"
        except RuntimeError:
            return None
    return chosen / "dsgraph" / "calibration"


def path_of(host: str, device: str) -> Path | None:
    """Return the file of a host and device; None where there is no folder for it."""
    place = folder()
    return None if place is None else place / f"{_word(host)}-{_word(device)}.json"


def load(host: str, device: str) -> CalibrationRecord | None:
    """Return the calibration of a host and device; None when there is none.

    Raises:
        CalibrationError: The file is damaged, of another version or cannot be read.
    """
    path = path_of(host, device)
    if path is None:
        return None
    record = _read(path)
    if record is not None and (record.host, record.device) != (host, device):
        raise CalibrationError(
            f"{path} is of device {record.device!r} on host {record.host!r}, not of {device!r} on {host!r}: {_ADVICE}"
        )
    return record


def load_all(host: str) -> list[CalibrationRecord]:
    """Return the calibrations of all devices of a host.

    Raises:
        CalibrationError: One of the files is damaged, of another version or cannot be read.
    """
    place = folder()
    paths = sorted(place.glob(f"{_word(host)}-*.json")) if place is not None else []
    records = [_read(path) for path in paths]
    return [record for record in records if record is not None and record.host == host]


def save(record: CalibrationRecord) -> Path:
    """Replace the earlier calibration atomically, and return the path of the file.

    Raises:
        CalibrationError: It cannot be written.
    """
    path = path_of(record.host, record.device)
    if path is None:
        raise CalibrationError("there is no home folder to keep a calibration in: set XDG_CACHE_HOME")
    try:
        write_whole(path, f"{to_text(record)}\n".encode())
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    return path


def _read(path: Path) -> CalibrationRecord | None:
    try:
        return from_text(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({error.strerror}): {_ADVICE}") from error
    except RecordError as error:
        raise CalibrationError(f"{path} is damaged or not for this dsgraph ({error}): {_ADVICE}") from error


def _word(name: str) -> str:
    """Return a name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", name) or "_"
