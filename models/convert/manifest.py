"""What a checkpoint consists of: size and hash of every file, so that a damaged one is known by name. No torch."""

import hashlib
import json
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from parallel.errors import UsageError

MANIFEST = "manifest.json"

_HASH = "blake2b-128"
_BLOCK = 1 << 22  # bytes that are in memory at once


class Entry(NamedTuple):
    """size: bytes. hash: hexadecimal BLAKE2b of 16 bytes."""

    size: int
    hash: str


class Digest:
    """The entry of a file whose bytes go by, in order."""

    def __init__(self) -> None:
        self._size, self._hash = 0, hashlib.blake2b(digest_size=16)

    def update(self, data: bytes | memoryview) -> None:
        self._size += len(data)
        self._hash.update(data)

    @property
    def entry(self) -> Entry:
        return Entry(self._size, self._hash.hexdigest())


def digest(path: Path) -> Entry:
    """Reads the file. Raises OSError where it cannot."""
    found = Digest()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.entry


def listed(directory: Path, known: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entry of every file below `directory` by its relative path: as `known`, or read now."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = [path.relative_to(directory).as_posix() for path in paths]
    return {name: known.get(name) or digest(path) for name, path in zip(names, paths, strict=True)}


def write(directory: Path, entries: Mapping[str, Entry]) -> None:
    """The last file of a checkpoint: what lacks it, or a file in it, is not complete."""
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"hash": _HASH, "files": {name: list(entry) for name, entry in sorted(entries.items())}}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[str, Entry]:
    """What `write` wrote. Raises UsageError where it is missing or damaged."""
    file = directory / MANIFEST
    try:
        found = json.loads(file.read_bytes())
        if found["hash"] != _HASH:
            raise ValueError(f"hash={found['hash']!r}: must be {_HASH}")
        entries = {str(name): Entry(int(size), str(value)) for name, (size, value) in found["files"].items()}
        if not entries or any("\0" in name for name in entries):
            raise ValueError("it lists no file" if not entries else "it lists what can be no file")
        return entries
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())[:200]
        raise UsageError(f"{file}: cannot be read: {reason or type(error).__name__}") from error


def wrong_size(directory: Path, entries: Mapping[str, Entry]) -> str:
    """The first file that is missing or has another size than it should, or nothing. Reads no file."""
    for name, entry in entries.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"{path}: {error.strerror}"
        if size != entry.size:
            return f"{path}: has {size:,} bytes, {entry.size:,} were saved"
    return ""


def wrong_content(directory: Path, entries: Mapping[str, Entry], names: Iterable[str]) -> str:
    """The first of the files `names` that is not what was saved, or nothing. Reads them."""
    for name in names:
        path = directory / name
        try:
            found = digest(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if found != entries[name]:
            return f"{path}: is not what was saved: its hash is {found.hash}, {entries[name].hash} was written down"
    return ""


def check(directory: Path, only: Container[str] | None = None) -> None:
    """Reads every file, or `only` those. Raises UsageError, one line, for the first that is not as the manifest says."""
    entries = {name: entry for name, entry in read(directory).items() if only is None or name in only}
    if wrong := wrong_size(directory, entries) or wrong_content(directory, entries, entries):
        raise UsageError(f"{wrong}; name another checkpoint")
