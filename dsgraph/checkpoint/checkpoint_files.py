"""The files of a checkpoint: `engine.json` contains all checksums and its own; `latest` names the newest checkpoint."""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from dsgraph.utils.errors import CheckpointError
from dsgraph.utils.files import write_whole
from dsgraph.utils.typed_json import decode, encode

FORMAT = "dsgraph-engine-2"
ABOUT = "engine.json"
LATEST = "latest"
_TAG = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_LONGEST_TAG = 200  # bytes: file names have at most 255, and the name of an unfinished checkpoint is longer
_LATEST_LINE = re.compile(r"(?P<tag>[^\n]*?)(?P<sum>[ \t]*)\n")
_HEAD = re.compile(rb'\{"checksum": "(?P<sum>[0-9a-f]{8})",')
_BLOCK = 2**22
_READERS = 4  # threads: reading and checksums release the GIL


def check_tag(tag: object) -> str:
    """Return a tag, which may be a number, as text.

    Raises:
        CheckpointError: The tag cannot be the name of a folder.
    """
    text = str(tag)
    problem = _why_no_tag(text)
    if problem:
        raise CheckpointError(f"tag {text!r}: {problem}")
    return text


def _why_no_tag(text: str) -> str:
    if not _TAG.fullmatch(text) or text != text.strip() or not text.isprintable():
        return "it is a folder name: use at least one printable character, no '/' or '\\', and no spaces at its ends"
    if text.startswith("."):
        return "names that begin with '.' are reserved for checkpoints that are being written"
    if text.casefold() == LATEST:
        return f"the file {LATEST!r} names the newest checkpoint: choose another tag; to load that one leave tag out"
    if len(text.encode()) > _LONGEST_TAG:
        return f"it has {len(text.encode())} bytes, and at most {_LONGEST_TAG} are allowed"
    return ""


def latest_tag(folder: Path) -> str | None:
    """Return the tag of the newest checkpoint in a folder; None without a file `latest`.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        text = (folder / LATEST).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read ({error}): load a checkpoint by its tag") from None
    found = _LATEST_LINE.fullmatch(text)
    if found is None and _is_of_deepspeed(folder, text):
        return text  # the caller reports that it is no checkpoint of dsgraph
    if found is None or _why_no_tag(found["tag"]) or found["sum"] not in ("", _blanks(found["tag"])):
        raise CheckpointError(
            f"{folder / LATEST} is damaged: load a checkpoint by its tag; known: {_known(folder)}. To write it by "
            "hand, write a tag and a newline"
        )
    return found["tag"]


def _is_of_deepspeed(folder: Path, text: str) -> bool:
    """Return True if a file `latest` is as DeepSpeed writes it, without a newline, for a checkpoint of DeepSpeed."""
    named = folder / text
    return bool(text) and text.isprintable() and named.is_dir() and not (named / ABOUT).is_file()


def latest_line(tag: str) -> bytes:
    """Return the content of the file `latest`: a tag followed by its checksum."""
    return f"{tag}{_blanks(tag)}\n".encode()


def known_tags(folder: Path) -> list[str]:
    """Return the tags of the checkpoints in a folder, sorted."""
    names = (path.parent.name for path in folder.glob(f"*/{ABOUT}"))
    return sorted(name for name in names if not name.startswith("."))


def encode_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `engine.json` as JSON values that preserve types.

    Raises:
        CheckpointError: A value is of a type that a checkpoint does not keep; the message names it.
    """
    return {"format": FORMAT, **{key: encode(value, key) for key, value in about.items()}}


def write_about(path: Path, about: Mapping[str, Any]) -> None:
    """Write `engine.json` after all other files of a checkpoint.

    Args:
        path: The folder.
        about: Its content without the checksums, from `encode_about`.
    """
    paths = sorted(path.iterdir())
    files = dict(zip([path.name for path in paths], _checksums(paths), strict=True))
    write_whole(path / ABOUT, _with_checksum({**about, "files": files}))


def _checksums(paths: Sequence[Path]) -> list[int]:
    if threading.current_thread() is not threading.main_thread():  # the interpreter may end, which starts no threads
        return list(map(_checksum, paths))
    with ThreadPool(_READERS) as pool:
        return pool.map(_checksum, paths)


def read_about(path: Path, *, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Return the content of `engine.json` after comparing the checksums of a share of the files.

    Args:
        path: The checkpoint.
        share: Number of the share that is checked.
        shares: Number of shares, one per rank.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or of another format.
    """
    try:
        content = (path / ABOUT).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir():
            raise CheckpointError(f"file {ABOUT} is missing: {_OTHER}") from None
        raise CheckpointError(f"there is no checkpoint {path.name!r}; known: {_known(path.parent)}") from None
    about = _without_checksum(content)
    for number, (name, checksum) in enumerate(about["files"].items()):
        if number % shares != share:
            continue
        if not (path / name).is_file() or _checksum(path / name) != checksum:
            of = "" if about["tag"] == path.name else f", or {ABOUT} is not its own, which is of {about['tag']!r}"
            raise CheckpointError(f"file {name} is damaged or missing{of}: {_OTHER}")
    return about


_OTHER = "load another checkpoint by its tag"


def _with_checksum(about: Mapping[str, Any]) -> bytes:
    """Return JSON whose first key is the checksum of everything after that key."""
    rest = json.dumps(about, indent=1, allow_nan=False).removeprefix("{").encode() + b"\n"
    return b'{"checksum": "%08x",' % zlib.crc32(rest) + rest


def _without_checksum(content: bytes) -> dict[str, Any]:
    head = _HEAD.match(content)
    if head is not None and int(head["sum"], 16) == zlib.crc32(content[head.end() :]):
        about: dict[str, Any] = json.loads(content)
        if about["format"] == FORMAT:
            return {key: decode(value) for key, value in about.items()}
        found = about["format"]
    else:
        found = None if head is not None else _older_format(content)
    if found is None:
        raise CheckpointError(f"file {ABOUT} is damaged: {_OTHER}")
    raise CheckpointError(f"file {ABOUT} has the format {found!r}, and this version of dsgraph reads {FORMAT!r}")


def _older_format(content: bytes) -> str | None:
    """Return the format of an `engine.json` from before checksums; None if it is damaged."""
    try:
        found = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found != FORMAT else None


def _known(folder: Path) -> str:
    return ", ".join(known_tags(folder)) or "none"


def _blanks(tag: str) -> str:
    """Return the checksum of a tag as spaces and tabs, so that a reader of `latest` sees only the tag."""
    return f"{zlib.crc32(tag.encode()):032b}".replace("0", " ").replace("1", "\t")


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total
