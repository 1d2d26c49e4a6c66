"""The files of a checkpoint: a folder that is written under another name, and renamed when all of it is there.

    checkpoints/latest                       the newest tag
    checkpoints/<tag>/engine.json            checksums of itself and of every other file
    checkpoints/.<tag>.<number>.unfinished   being written; locked as long as its writer lives
    checkpoints/.<tag>.replaced              the old one of that tag, while the new one takes its place

A process that is killed leaves one of the last two. The next writer removes the first; the next writer or reader gives
the second its name back where there is no new one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from dsgraph.errors import CheckpointError
from dsgraph.files import write_whole
from dsgraph.typed_json import decode, encode

FORMAT = "dsgraph-engine-2"
ABOUT = "engine.json"
_LATEST, _NEXT_LATEST = "latest", ".latest.next"
_UNFINISHED = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.unfinished", re.DOTALL)
_REPLACED = re.compile(r"\.(?P<tag>.+)\.replaced", re.DOTALL)
_TAG = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_LONGEST_TAG = 200  # bytes: names of files have 255, and a checkpoint that is written has a longer one
_LATEST_LINE = re.compile(r"(?P<tag>[^\n]*?)(?P<sum>[ \t]*)\n")
_HEAD = re.compile(rb'\{"checksum": "(?P<sum>[0-9a-f]{8})",')
_BLOCK = 2**22
_READERS = 4  # threads: reading and summing up hold no lock


def check_tag(tag: object) -> str:
    """The tag as text, if it can name a folder: also a number.

    Raises:
        CheckpointError: It cannot.
    """
    text = str(tag)
    problem = ""
    if not _TAG.fullmatch(text) or text != text.strip() or not text.isprintable():
        problem = "it names a folder: it takes no '/' or '\\', no blank at its ends, and at least one character"
    elif text.startswith("."):
        problem = "names that begin with '.' are of checkpoints that are being written"
    elif text.casefold() == _LATEST:
        problem = (
            f"the file {_LATEST!r} names the newest checkpoint: choose another tag; to load that one leave tag out"
        )
    elif len(text.encode()) > _LONGEST_TAG:
        problem = f"it has {len(text.encode())} bytes, and {_LONGEST_TAG} are the most"
    if problem:
        raise CheckpointError(f"tag {text!r}: {problem}")
    return text


def latest_tag(folder: Path) -> str | None:
    """The tag of the newest checkpoint in a folder; None where no file says it.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        text = (folder / _LATEST).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / _LATEST} cannot be read ({error}): load a checkpoint by its tag") from None
    found = _LATEST_LINE.fullmatch(text)
    if found is None and text and text.isprintable() and not (folder / text / ABOUT).is_file():
        return text  # no newline, as DeepSpeed writes it; and no checkpoint, which whoever loads it says
    if found is None or not found["tag"] or found["sum"] not in ("", _blanks(found["tag"])):
        raise CheckpointError(
            f"{folder / _LATEST} is damaged: load a checkpoint by its tag; known: {known_tags(folder)}. (Written by "
            "hand, it is a tag and a newline)"
        )
    return found["tag"]


def find_tag(folder: Path, tag: object = None) -> str | None:
    """The tag of a checkpoint that is to be read.

    Args:
        folder: Folder of checkpoints.
        tag: Which one; None: the newest.

    Returns:
        It; None where there is no checkpoint and no tag was given.

    Raises:
        CheckpointError: The tag can name no folder; or the file that names the newest is damaged, or missing beside
            several checkpoints.
    """
    with suppress(OSError):  # where nothing can be renamed, what was being replaced is not there
        _put_back_killed(folder)
    if tag is not None:
        return check_tag(tag)
    newest = latest_tag(folder)
    if newest is not None:
        return newest
    known = _known(folder)
    if len(known) > 1:
        raise CheckpointError(
            f"the file {_LATEST!r} is missing, and there are several checkpoints: load one by its tag; known: "
            f"{known_tags(folder)}"
        )
    return known[0] if known else None  # its writer was killed ahead of the file


def known_tags(folder: Path) -> str:
    """The checkpoints of a folder, in words."""
    return ", ".join(_known(folder)) or "none"


def _known(folder: Path) -> list[str]:
    names = (path.parent.name for path in folder.glob(f"*/{ABOUT}"))
    return sorted(name for name in names if not name.startswith("."))


@dataclass(eq=False)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: Folder of checkpoints.
        tag: Name of this one.
        path: Where its files are until it is complete: a folder that no other writer uses.
    """

    folder: Path
    tag: str
    path: Path
    _lock: int | None = None

    @classmethod
    def begin(cls, folder: Path, tag: str) -> Unfinished:
        """Makes the folder to write into, and removes what killed writers have left.

        Raises:
            CheckpointError: Another writer that lives has begun the same checkpoint, or the tag is the name of
                something else.
            OSError: The file system refuses.
        """
        check_tag(tag)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _refuse_other(folder / tag)
            _put_back(folder)
            for path in folder.iterdir():
                found = _UNFINISHED.fullmatch(path.name)
                if found is not None and not _remove_left(path) and found["tag"] == tag:
                    raise CheckpointError(
                        f"{folder / tag} is being written by another job or engine: wait for it, or choose another tag "
                        "or folder"
                    )
            path = folder / f".{tag}.{secrets.token_hex(4)}.unfinished"
            path.mkdir()
            return cls(folder, tag, path, _try_lock(path))

    def complete(self, about: Mapping[str, Any]) -> Path:
        """Makes a checkpoint of what was written, and the latest one. One of the same name is replaced.

        Args:
            about: What `engine.json` says besides the checksums, as `encode_about` gives it.

        Returns:
            Its folder.

        Raises:
            CheckpointError: The tag is the name of something else.
            OSError: The file system refuses; the checkpoint before stays, and is the latest.
        """
        paths, final = sorted(self.path.iterdir()), self.folder / self.tag
        with ThreadPool(_READERS) as pool:  # an executor takes nothing more when the program ends
            files = dict(zip([path.name for path in paths], pool.map(_checksum, paths), strict=True))
        write_whole(self.path / ABOUT, _with_checksum({**about, "tag": self.tag, "files": files}))
        with _locked(self.folder):
            _refuse_other(final)
            upcoming = self.folder / _NEXT_LATEST  # written first: behind the renames nothing takes room
            upcoming.write_bytes(f"{self.tag}{_blanks(self.tag)}\n".encode())
            replaced = self.folder / f".{self.tag}.replaced"
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            self.path.rename(final)
            upcoming.replace(self.folder / _LATEST)
            shutil.rmtree(replaced, ignore_errors=True)
        self._let_go()
        return final

    def give_up(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError), _locked(self.folder):
            (self.folder / _NEXT_LATEST).unlink(missing_ok=True)
            _put_back(self.folder)
        self._let_go()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        _unlock(lock)


def _put_back_killed(folder: Path) -> None:
    """Gives checkpoints their names back whose writer was killed when it replaced them."""
    if folder.is_dir() and any(_REPLACED.fullmatch(path.name) for path in folder.iterdir()):
        with _locked(folder):
            _put_back(folder)


def _put_back(folder: Path) -> None:
    for path in list(folder.iterdir()):
        found = _REPLACED.fullmatch(path.name)
        if found is not None and (folder / found["tag"]).exists():
            shutil.rmtree(path, ignore_errors=True)
        elif found is not None:
            path.rename(folder / found["tag"])


def _refuse_other(final: Path) -> None:
    """A folder of something else is not to be replaced."""
    is_there = final.is_symlink() or final.exists()
    if is_there and not (final.is_dir() and ((final / ABOUT).is_file() or not any(final.iterdir()))):
        raise CheckpointError(f"{final} is there and is no checkpoint, which could be replaced: choose another tag")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among the writers of a folder, for the moments in which names change."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems without locks: then nothing keeps two jobs apart
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(descriptor)


def _try_lock(path: Path) -> int | None:
    """A lock that the kernel lets go when this process ends, however it does; None: another one has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        pass
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open as well
        os.close(descriptor)


def _remove_left(path: Path) -> bool:
    """Removes the files of a writer that does not live any more; False: it lives."""
    lock = _try_lock(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        _unlock(lock)
    return lock is not None


def encode_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """What `engine.json` is to say, as JSON values that keep its types.

    Raises:
        CheckpointError: A value is of a type that a checkpoint does not keep; the message names it.
    """
    return {"format": FORMAT, **{key: encode(value, key) for key, value in about.items()}}


def read_about(path: Path, *, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """What `engine.json` says, when a share of the files is as it was written.

    Args:
        path: The checkpoint.
        share: Which of the shares is checked.
        shares: How many there are: one a rank.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or of another format.
    """
    try:
        content = (path / ABOUT).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir():
            raise CheckpointError(f"file {ABOUT} is missing: {_OTHER}") from None
        raise CheckpointError(f"there is no checkpoint {path.name!r}; known: {known_tags(path.parent)}") from None
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
    """JSON whose first key is the checksum of all that follows that key."""
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
    """The format of a file from before there were checksums of it."""
    try:
        found = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found != FORMAT else None


def _blanks(tag: str) -> str:
    """The checksum of a tag in blanks, so that whoever reads the file `latest` sees the tag alone."""
    return f"{zlib.crc32(tag.encode()):032b}".replace("0", " ").replace("1", "\t")


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total
