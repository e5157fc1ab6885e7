"""Samples out of tars: where they lie, and what is in one, however damaged the tar is.

Nothing is ever written to a file and no name is taken for a path, so a member called ``../x`` is
a sample like any other. Offsets and sizes are bytes.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sm_train.entrypoints.common.rng import Ints

BLOCK = tarfile.BLOCKSIZE
_NOTHING = bytes(BLOCK)
_READ = 1 << 14
"""Read at once while walking: a caption and facts lie behind an image's header or before it."""

_FILE_TYPES = (b"0", b"\0", b"7")
_NAMES_NEXT = (b"L", b"K", b"x", b"X", b"g")


class TarError(ValueError):
    """A part of a tar cannot be used: a fixed code, and the detail for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class MemberHeader:
    """One member's header; ``data`` is the size of what follows, padding included."""

    name: str
    typeflag: bytes
    size: int

    @property
    def padded_size(self) -> int:
        return -(-self.size // BLOCK) * BLOCK


@dataclass(frozen=True, eq=False)
class TarScan:
    """What a walk through a tar found.

    Sample ``i`` is called ``keys[i]`` and lies in the bytes ``starts[i]``:``stops[i]``; its first
    member with a wanted extension has its data in ``wanted[i]``, start and stop, (0, 0) where it
    has none. ``damage`` has a line for each place at which something was lost.
    """

    keys: tuple[str, ...]
    starts: Ints
    stops: Ints
    wanted: tuple[tuple[int, int], ...]
    bytes: int
    damage: tuple[str, ...]


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's rule: a key ends at the first dot of the file name and keeps the folder."""
    folder, slash, file_name = name.rpartition("/")
    stem, _, extension = file_name.partition(".")
    return folder + slash + stem, extension.lower()


def parse_header(block: bytes) -> MemberHeader | None:
    """One 512-byte header; None for the zeros that end a tar.

    Raises:
        TarError: ``tar-damaged``: the checksum is wrong, or there is none.
    """
    if block == _NOTHING:
        return None
    try:
        checksum = int(block[148:156].strip(b" \0"), 8)
        size = _number(block[124:136])
    except ValueError:
        checksum = size = -1
    # The checksum is taken with its own field full of spaces.
    if size < 0 or sum(block) - sum(block[148:156]) + 8 * 32 != checksum:
        raise TarError("tar-damaged", "no header where one should be")
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    return MemberHeader(name, block[156:157], size)


def _number(field: bytes) -> int:
    """Octal digits, or GNU's base 256 for what is larger than 8 GiB."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def sample_members(content: memoryview) -> tuple[str, dict[str, memoryview]]:
    """The key of one sample, and its files by extension; ``content`` is its part of the tar.

    Of two files with one extension the first counts. What stands behind damage is not looked at.

    Raises:
        TarError: nothing is left of the sample, or a member goes on behind the end of ``content``.
    """
    key, place = "", 0
    members: dict[str, memoryview] = {}
    name: str | None = None
    while place + BLOCK <= len(content):
        try:
            header = parse_header(bytes(content[place : place + BLOCK]))
        except TarError:
            if members:
                break
            raise
        if header is None:
            break
        behind = place + BLOCK + header.size
        if behind > len(content):
            raise TarError("tar-truncated", f"{printable_name(header.name)} is cut short")
        data = content[place + BLOCK : behind]
        if header.typeflag in _NAMES_NEXT:
            name = name_override(header.typeflag, bytes(data)) or name
        else:
            if header.typeflag in _FILE_TYPES:
                key, extension = split_name(name or header.name)
                members.setdefault(extension, data)
            name = None
        place += BLOCK + header.padded_size
    if not members:
        raise TarError("tar-truncated", "nothing is left of the sample")
    return key, members


def name_override(kind: bytes, data: bytes) -> str | None:
    """The name that an extra header gives the member behind it, if it gives one.

    GNU's ``L`` holds the name; POSIX's ``x`` (pax) holds records ``LENGTH KEY=VALUE\\n``, of which
    LENGTH counts all (POSIX.1-2017, pax, "pax Extended Header").
    """
    if kind == b"L":
        return _text(data)
    if kind != b"x":
        return None
    place = 0
    while (space := data.find(b" ", place)) > 0:
        try:
            behind = place + int(data[place:space])
        except ValueError:
            return None
        record = data[space + 1 : behind - 1]
        if record.startswith(b"path="):
            return _text(record.removeprefix(b"path="))
        if behind <= space:
            return None
        place = behind
    return None


def printable_name(name: str) -> str:
    """A member's name on one line of bearable length; a damaged header holds anything."""
    plain = repr(name)[1:-1]
    return plain if len(plain) <= 80 else f"…{plain[-79:]}"


def scan_tar(path: Path, wanted: Collection[str] = ()) -> TarScan:
    """Find the samples of a tar, and in each the member of a ``wanted`` extension, by headers.

    Damage loses the samples that it touches, not those behind it: the walk goes on at the next
    header. What a missing end has cost is not known, only that it is missing.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _Scanner(file.fileno()).walk(wanted)


@dataclass(frozen=True)
class _Member:
    """A member: from its first header to behind its padding, and its data without it."""

    name: str
    start: int
    stop: int
    data: tuple[int, int]


class _Scanner:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._block, self._block_start = b"", 0
        self._damage: list[str] = []

    def walk(self, wanted: Collection[str]) -> TarScan:
        keys: list[str] = []
        starts: list[int] = []
        stops: list[int] = []
        places: list[tuple[int, int]] = []
        extensions = set[str]()
        for file in self._files():
            key, extension = split_name(file.name)
            new = not keys or key != keys[-1] or extension in extensions
            if new or file.start > stops[-1]:  # the second: something damaged lies between
                keys.append(key)
                starts.append(file.start)
                stops.append(file.stop)
                places.append((0, 0))
                extensions.clear()
            stops[-1] = file.stop
            extensions.add(extension)
            if extension in wanted and places[-1] == (0, 0):
                places[-1] = file.data
        return TarScan(
            tuple(keys),
            np.array(starts, np.int64),
            np.array(stops, np.int64),
            tuple(places),
            self._size,
            tuple(self._damage),
        )

    def _files(self) -> Iterator[_Member]:
        place = start = 0
        long_name: str | None = None
        while place + BLOCK <= self._size:
            try:
                header = parse_header(self._read(place, BLOCK))
            except TarError:
                start = place = self._next_header(place)
                long_name = None
                if place + BLOCK > self._size:
                    return
                continue
            if header is None:
                return
            behind = place + BLOCK + header.padded_size
            if behind > self._size:
                self._damage.append(f"byte {place}: cut short within {printable_name(header.name)}")
                return
            if header.typeflag in _NAMES_NEXT:
                said = os.pread(self._descriptor, header.size, place + BLOCK)
                long_name = name_override(header.typeflag, said) or long_name
            else:
                if header.typeflag in _FILE_TYPES:
                    data = place + BLOCK, place + BLOCK + header.size
                    yield _Member(long_name or header.name, start, behind, data)
                start, long_name = behind, None
            place = behind
        self._damage.append(f"byte {place}: cut short, the end mark is missing")

    def _next_header(self, damaged: int) -> int:
        """Where the next header that is whole begins, or the end of the file."""
        place = damaged + BLOCK
        while place + BLOCK <= self._size:
            block = self._read(place, BLOCK)
            if block[257:262] == b"ustar":
                try:
                    parse_header(block)
                except TarError:
                    pass
                else:
                    break
            place += BLOCK
        self._damage.append(f"byte {damaged}: a damaged header; {place - damaged} bytes skipped")
        return place

    def _read(self, place: int, size: int) -> bytes:
        start = place - self._block_start
        if not 0 <= start <= len(self._block) - size:
            self._block = os.pread(self._descriptor, _READ, place)
            self._block_start, start = place, 0
        return self._block[start : start + size]
