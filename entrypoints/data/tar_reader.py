"""Finds the samples of a tar archive by its headers and reads their files, despite any damage.

The header parser is our own, because ``tarfile`` stops at damage and takes an unreadable header
for the end of the archive. This one continues at the next intact header and reports what was lost.

Nothing is ever extracted and no name is used as a path, so a member called ``../x`` is a sample
like any other. Offsets and sizes are bytes.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.shard_format import END_MARK

BLOCK = tarfile.BLOCKSIZE
"""Size of a header; file data are padded to a multiple of it."""

_READ_AHEAD = 1 << 14
"""Bytes read at once while scanning: a caption and metadata lie next to an image's header."""

_ZERO_BLOCK = bytes(BLOCK)
_FILE_TYPES = (b"0", b"\0", b"7")
_EXTENSION_TYPES = (b"L", b"K", b"x", b"X", b"g")
"""Headers that describe the next member: GNU long names, and POSIX extended (pax) headers."""


class TarError(ValueError):
    """A part of a tar cannot be used; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class MemberHeader:
    """One member's header: its name, its POSIX type flag, and the size of its data."""

    name: str
    typeflag: bytes
    size: int

    @property
    def padded_size(self) -> int:
        """Size of the data with padding to whole blocks."""
        return -(-self.size // BLOCK) * BLOCK


@dataclass(frozen=True, eq=False)
class TarScan:
    """The samples of a tar, and its faults.

    Sample ``i`` has the key ``keys[i]`` and lies in the bytes ``starts[i]``:``stops[i]``, both
    int64 (num_samples,). ``wanted[i]`` is the start and the stop of the data of its first file
    with a wanted extension, (0, 0) if it has none; ``extensions[i]`` are those of all its files.
    ``end`` is the offset at which the scan ended: of the end mark, if there is one.

    ``damage`` has a line for each place where something was lost. ``irregularities`` has a line
    for each fault that loses nothing: a file name used twice in a row, half an end mark.
    """

    keys: tuple[str, ...]
    starts: Ints
    stops: Ints
    wanted: tuple[tuple[int, int], ...]
    bytes: int
    end: int
    damage: tuple[str, ...]
    irregularities: tuple[str, ...]
    extensions: tuple[tuple[str, ...], ...]


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into sample key and extension, as WebDataset does.

    The key ends at the first dot of the file name and includes the folder.
    """
    folder, slash, file_name = name.rpartition("/")
    stem, _, extension = file_name.partition(".")
    return folder + slash + stem, extension.lower()


def parse_header(block: bytes) -> MemberHeader | None:
    """Parse a 512-byte header; return None for the zeros that end a tar.

    Raises:
        TarError: ``tar-damaged``: the checksum is wrong or missing.
    """
    if block == _ZERO_BLOCK:
        return None
    try:
        checksum = int(block[148:156].strip(b" \0"), 8)
        size = _parse_number(block[124:136])
    except ValueError:
        checksum = size = -1
    # The checksum is the sum of the header's bytes, with its own eight counted as spaces.
    if size < 0 or sum(block) - sum(block[148:156]) + 8 * ord(" ") != checksum:
        raise TarError("tar-damaged", "no header where one should be")
    name = _decode_text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:  # USTAR splits long names at a slash
        name = f"{_decode_text(block[345:500])}/{name}"
    return MemberHeader(name, block[156:157], size)


def _parse_number(field: bytes) -> int:
    """Parse octal digits, or GNU's base 256 for numbers above 8 GiB."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _decode_text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def sample_members(content: memoryview) -> tuple[str, dict[str, memoryview]]:
    """Return the key of one sample and its files by extension; ``content`` is its part of a tar.

    Of two files with the same extension the first one counts. Files after damage are ignored.

    Raises:
        TarError: no file is left of the sample, or a member reaches beyond ``content``.
    """
    key, offset = "", 0
    members: dict[str, memoryview] = {}
    long_name: str | None = None
    while offset + BLOCK <= len(content):
        try:
            header = parse_header(bytes(content[offset : offset + BLOCK]))
        except TarError:
            if members:
                break
            raise
        if header is None:
            break
        stop = offset + BLOCK + header.size
        if stop > len(content):
            raise TarError("tar-truncated", f"{printable_name(header.name)} is cut short")
        data = content[offset + BLOCK : stop]
        if header.typeflag in _EXTENSION_TYPES:
            long_name = name_override(header.typeflag, bytes(data)) or long_name
        else:
            if header.typeflag in _FILE_TYPES:
                key, extension = split_name(long_name or header.name)
                members.setdefault(extension, data)
            long_name = None
        offset += BLOCK + header.padded_size
    if not members:
        raise TarError("tar-truncated", "nothing is left of the sample")
    return key, members


def name_override(typeflag: bytes, data: bytes) -> str | None:
    """Return the name that an extension header gives the next member, or None.

    GNU's ``L`` holds the name. POSIX's ``x`` (pax) holds records ``LENGTH KEY=VALUE\\n``, where
    LENGTH counts the whole record (POSIX.1-2017, pax, "pax Extended Header").
    """
    if typeflag == b"L":
        return _decode_text(data)
    if typeflag != b"x":
        return None
    start = 0
    while (space := data.find(b" ", start)) > 0:
        try:
            stop = start + int(data[start:space])
        except ValueError:
            return None
        record = data[space + 1 : stop - 1]
        if record.startswith(b"path="):
            return _decode_text(record.removeprefix(b"path="))
        if stop <= space:  # a damaged length, which would not advance
            return None
        start = stop
    return None


def printable_name(name: str) -> str:
    """Return a member's name on one line of at most 80 characters; damaged ones hold anything."""
    escaped = repr(name)[1:-1]
    return escaped if len(escaped) <= 80 else f"…{escaped[-79:]}"


def scan_tar(path: Path, wanted: Collection[str] = ()) -> TarScan:
    """Find the samples of a tar by its headers, and in each the file with a ``wanted`` extension.

    Damage loses the samples that it touches, not those after it: the scan continues at the next
    intact header. If the end of the file is missing, the scan cannot know what was in it.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _Scanner(file.fileno()).scan(wanted)


@dataclass(frozen=True)
class _Member:
    """A file in a tar.

    ``start`` is the offset of its first header, ``stop`` that after its padding, ``data`` the
    start and the stop of its content.
    """

    name: str
    start: int
    stop: int
    data: tuple[int, int]


class _Scanner:
    """One scan of an open tar."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._buffer, self._buffer_start = b"", 0
        self._damage: list[str] = []
        self._irregularities: list[str] = []
        self._last_name: str | None = None
        self._end = 0

    def scan(self, wanted: Collection[str]) -> TarScan:
        """Group the members into samples: consecutive files with the same key.

        A file whose extension the sample already has starts another sample of the same key, and
        so does a file after a gap, because damage may have swallowed the rest of the sample.
        """
        keys: list[str] = []
        starts: list[int] = []
        stops: list[int] = []
        wanted_data: list[tuple[int, int]] = []
        of_samples: list[tuple[str, ...]] = []
        # Most samples have the same extensions: each combination is kept once.
        combinations: dict[tuple[str, ...], tuple[str, ...]] = {}
        extensions: dict[str, None] = {}
        for file in self._files():
            key, extension = split_name(file.name)
            same_key = bool(keys) and key == keys[-1]
            if same_key and extension in extensions:
                self._irregularities.append(
                    f"offset {file.start}: {printable_name(file.name)} is in its sample twice"
                )
            if not same_key or extension in extensions or file.start > stops[-1]:
                keys.append(key)
                starts.append(file.start)
                stops.append(file.stop)
                wanted_data.append((0, 0))
                of_samples.append(())
                extensions.clear()
            stops[-1] = file.stop
            extensions[extension] = None
            combination = tuple(extensions)
            of_samples[-1] = combinations.setdefault(combination, combination)
            if extension in wanted and wanted_data[-1] == (0, 0):
                wanted_data[-1] = file.data
        return TarScan(
            tuple(keys),
            np.array(starts, np.int64),
            np.array(stops, np.int64),
            tuple(wanted_data),
            self._size,
            self._end,
            tuple(self._damage),
            tuple(self._irregularities),
            tuple(of_samples),
        )

    def _files(self) -> Iterator[_Member]:
        """Yield the files in order, past damage, up to the end mark or the end of the file."""
        offset = start = 0  # of this header, and of the first extension header that belongs to it
        long_name: str | None = None
        while offset + BLOCK <= self._size:
            try:
                header = parse_header(self._read(offset, BLOCK))
            except TarError:
                start = offset = self._end = self._find_header(offset)
                long_name = None
                if offset + BLOCK > self._size:
                    return
                continue
            if header is None:
                self._check_end_mark(offset)
                return
            stop = offset + BLOCK + header.padded_size
            if stop > self._size:
                name = printable_name(long_name or header.name)
                self._damage.append(self._locate(offset, f"{name} is cut short"))
                return
            if header.typeflag in _EXTENSION_TYPES:
                extension = os.pread(self._descriptor, header.size, offset + BLOCK)
                long_name = name_override(header.typeflag, extension) or long_name
            else:
                self._last_name = long_name or header.name
                if header.typeflag in _FILE_TYPES:
                    data = offset + BLOCK, offset + BLOCK + header.size
                    yield _Member(self._last_name, start, stop, data)
                start, long_name = stop, None
            offset = self._end = stop
        self._damage.append(self._locate(offset, "cut short, the end mark is missing"))

    def _check_end_mark(self, offset: int) -> None:
        """Record an end mark of one block instead of two; readers stop at the first."""
        mark = self._read(offset, len(END_MARK))
        if mark != END_MARK:
            is_short = len(mark) < len(END_MARK)
            fault = "cut short, the end mark is incomplete" if is_short else "damaged end mark"
            self._irregularities.append(self._locate(offset, fault))

    def _find_header(self, damaged: int) -> int:
        """Return the offset of the next intact header, or one past the last whole block.

        Headers lie at multiples of the block size. Only those with the USTAR magic count, because
        a checksum alone matches too easily inside a file's data.
        """
        offset = damaged + BLOCK
        while offset + BLOCK <= self._size:
            block = self._read(offset, BLOCK)
            if block[257:262] == b"ustar":
                try:
                    parse_header(block)
                except TarError:
                    pass
                else:
                    break
            offset += BLOCK
        self._damage.append(
            self._locate(damaged, f"the header is damaged; {offset - damaged} bytes skipped")
        )
        return offset

    def _locate(self, offset: int, fault: str) -> str:
        """Return a line that names a fault and where it is."""
        last = self._last_name
        where = "at the start" if last is None else f"after {printable_name(last)}"
        return f"offset {offset}: {where}: {fault}"

    def _read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes, fewer at the end of the file, through a small read-ahead."""
        at = offset - self._buffer_start
        if not 0 <= at <= len(self._buffer) - size:
            self._buffer = os.pread(self._descriptor, _READ_AHEAD, offset)
            self._buffer_start, at = offset, 0
        return self._buffer[at : at + size]
