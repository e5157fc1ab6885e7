"""Finds the samples of a tar archive by its headers and reads their files, despite any damage.

The header parser is our own, because ``tarfile`` stops at damage and takes an unreadable header
for the end of the archive. This one continues at the next intact header and reports what was lost.

Nothing is ever extracted and no name is used as a path, so a member called ``../x`` is a sample
like any other. Offsets and sizes are bytes.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.shards.shard_format import END_MARK

BLOCK = tarfile.BLOCKSIZE
"""Size of a header; file data are padded to a multiple of it."""

_READ_AHEAD = 1 << 14
"""Bytes read at once while scanning: a caption and metadata lie next to an image's header."""

_ZERO_BLOCK = bytes(BLOCK)
_FILE_TYPES = (b"0", b"\0", b"7")
_EXTENSION_TYPES = (b"L", b"K", b"x", b"X", b"g")
"""Headers that describe the next member: GNU long names, and POSIX extended (pax) headers."""

_MAGIC = (b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd")
"""How files begin that gzip, xz, bzip2 and zstd have compressed."""

COMPRESSED_FAULT = "compressed; decompress it, as with gunzip"

_LINK_TYPES = (b"1", b"2")
"""Hard links, which have no content of their own, and symbolic ones."""

_GNU_SPARSE = b"S"
_IS_EXTENDED, _IS_CONTINUED = 482, 504
"""Bytes of a GNU sparse header, and of the blocks of its map that follow it, which say whether
another block follows (GNU tar manual, "Storing Sparse Files")."""

_AFTER_END = 1 << 20
"""Bytes after the end mark that are searched for another archive; tar pads to 10 KiB at most."""


class TarError(ValueError):
    """A part of a tar cannot be used; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class MemberHeader:
    """One member's header: its name, its POSIX type flag, and the size of its data.

    ``is_sparse`` if the data are a file without its zeros, and ``has_sparse_map`` if blocks with
    the map of these lie between header and data.
    """

    name: str
    typeflag: bytes
    size: int
    is_sparse: bool = False
    has_sparse_map: bool = False

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
    ``sparse`` are the names of files that are stored without their zeros, and not read. ``links``
    are those of links, ``repeated`` those of files that their sample has already: neither counts.
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
    sparse: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into sample key and extension, as WebDataset does.

    The key ends at the first dot of the file name and includes the folder.
    """
    folder, slash, file_name = name.rpartition("/")
    stem, _, extension = file_name.partition(".")
    return folder + slash + stem, extension.lower()


_META_FOLDER = re.compile(r"(^|/)(__[^/]*__|__MACOSX)(/|$)")


def is_skipped(name: str) -> bool:
    """Return whether a file belongs to no sample, by its name; both readers and the index agree.

    Those are names that begin with a dot, in any folder, as macOS's tar stores attributes of each
    file in one whose name begins with ``._``; names without an extension, such as README; and what
    is in the folder ``__MACOSX`` of a Mac's archives, or in one such as ``__meta__``, which
    WebDataset skips at the top.
    """
    file_name = name.rpartition("/")[2]
    return file_name.startswith(".") or "." not in file_name or bool(_META_FOLDER.search(name))


def is_compressed(tar: TarBytes) -> bool:
    """Return whether it is a compressed archive."""
    return tar.pread(max(map(len, _MAGIC)), 0).startswith(_MAGIC)


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
    typeflag = block[156:157]
    is_sparse = typeflag == _GNU_SPARSE
    return MemberHeader(name, typeflag, size, is_sparse, is_sparse and bool(block[_IS_EXTENDED]))


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
    override = NO_OVERRIDE
    while offset + BLOCK <= len(content):
        try:
            header = parse_header(bytes(content[offset : offset + BLOCK]))
        except TarError:
            if members:
                break
            raise
        if header is None:
            break
        header = override.apply(header)
        if header.is_sparse:
            if members:  # of this sample or the next one; the scan has named it
                break
            raise TarError("tar-sparse", f"{printable_name(header.name)} is stored sparsely")
        stop = offset + BLOCK + header.size
        if stop > len(content):
            raise TarError("tar-truncated", f"{printable_name(header.name)} is cut short")
        data = content[offset + BLOCK : stop]
        if header.typeflag in _EXTENSION_TYPES:
            override = override.updated(header.typeflag, bytes(data))
        else:
            if header.typeflag in _FILE_TYPES and not is_skipped(header.name):
                key, extension = split_name(header.name)
                members.setdefault(extension, data)
            override = NO_OVERRIDE
        offset += BLOCK + header.padded_size
    if not members:
        raise TarError("tar-truncated", "nothing is left of the sample")
    return key, members


@dataclass(frozen=True)
class Override:
    """What extension headers say of the next member: its name and its size, None for its own.

    ``is_sparse`` if its data are a map and the parts between its zeros.
    """

    name: str | None = None
    size: int | None = None
    is_sparse: bool = False

    def updated(self, typeflag: bytes, data: bytes) -> Override:
        """Return this with what another extension header says.

        GNU's ``L`` holds the name. POSIX's ``x`` (pax) holds records ``LENGTH KEY=VALUE\\n``,
        where LENGTH counts the whole record (POSIX.1-2017, pax, "pax Extended Header").
        """
        if typeflag == b"L":
            return replace(self, name=_decode_text(data))
        if typeflag != b"x":
            return self
        found = self
        for key, value in _pax_records(data):
            if key == b"path":
                found = replace(found, name=_decode_text(value))
            elif key == b"size" and value.isdigit():
                found = replace(found, size=int(value))
            elif key.startswith(b"GNU.sparse."):
                found = replace(found, is_sparse=True)
        return found

    def apply(self, header: MemberHeader) -> MemberHeader:
        """Return the header of the next member; extension headers have sizes of their own."""
        if self is NO_OVERRIDE or header.typeflag in _EXTENSION_TYPES:
            return header
        return replace(
            header,
            name=header.name if self.name is None else self.name,
            size=header.size if self.size is None else self.size,
            is_sparse=header.is_sparse or self.is_sparse,
        )


NO_OVERRIDE = Override()


def _pax_records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a pax header, up to the first damaged record."""
    start = 0
    while (space := data.find(b" ", start)) > 0:
        try:
            stop = start + int(data[start:space])
        except ValueError:
            return
        key, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if stop <= space or not equals:  # a damaged length, which would not advance
            return
        yield key, value
        start = stop


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
        return scan_bytes(FileBytes(file.fileno()), wanted)


class TarBytes(Protocol):
    """A tar of ``size`` bytes of which any part can be read."""

    size: int

    def pread(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer at the end."""


class FileBytes:
    """A tar in a file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def pread(self, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on, fewer at the end."""
        return os.pread(self._descriptor, size, offset)


def scan_bytes(
    tar: TarBytes,
    wanted: Collection[str] = (),
    on_wanted: Callable[[int, int], None] = lambda start, stop: None,
) -> TarScan:
    """Scan a tar like :func:`scan_tar`.

    ``on_wanted`` is called with the start and the stop of each file with a ``wanted`` extension
    that counts, right after its header was read.
    """
    return _Scanner(tar).scan(wanted, on_wanted)


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

    def __init__(self, tar: TarBytes) -> None:
        self._tar = tar
        self._size = tar.size
        self._buffer, self._buffer_start = b"", 0
        self._damage: list[str] = []
        self._irregularities: list[str] = []
        self._sparse: list[str] = []
        self._links: list[str] = []
        self._repeated: list[str] = []
        self._last_name: str | None = None
        self._end = 0

    def scan(self, wanted: Collection[str], on_wanted: Callable[[int, int], None]) -> TarScan:
        """Group the members into samples: consecutive files with the same key.

        Of two files with the same extension the first one counts. A file after a gap starts
        another sample of the same key, because damage may have swallowed the rest of the sample.
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
            same_sample = bool(keys) and key == keys[-1] and file.start <= stops[-1]
            if same_sample and extension in extensions:
                self._irregularities.append(
                    f"offset {file.start}: {printable_name(file.name)} is in its sample twice"
                )
                self._repeated.append(file.name)
                stops[-1] = file.stop
                continue
            if not same_sample:
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
                on_wanted(*file.data)
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
            tuple(self._sparse),
            tuple(self._links),
            tuple(self._repeated),
        )

    def _files(self) -> Iterator[_Member]:
        """Yield the files in order, past damage, up to the end mark or the end of the file."""
        if is_compressed(self._tar):
            self._damage.append(COMPRESSED_FAULT)
            return
        offset = start = 0  # of this header, and of the first one that belongs to its file
        override = NO_OVERRIDE
        while offset + BLOCK <= self._size:
            try:
                header = parse_header(self._read(offset, BLOCK))
            except TarError:
                start = offset = self._end = self._find_header(offset)
                override = NO_OVERRIDE
                if offset + BLOCK > self._size:
                    return
                continue
            if header is None:
                self._check_end_mark(offset)
                return
            header = override.apply(header)
            first = offset + BLOCK + self._sparse_map_bytes(offset, header)
            stop = first + header.padded_size
            if stop > self._size:
                name = printable_name(header.name)
                self._damage.append(self._locate(offset, f"{name} is cut short"))
                return
            if header.typeflag in _EXTENSION_TYPES:
                extension = self._tar.pread(header.size, first)
                override = override.updated(header.typeflag, extension)
            else:
                self._last_name = header.name
                if header.is_sparse:
                    self._sparse.append(header.name)
                    start = stop
                elif header.typeflag in _LINK_TYPES:
                    self._links.append(header.name)
                elif header.typeflag in _FILE_TYPES and not is_skipped(header.name):
                    yield _Member(header.name, start, stop, (first, first + header.size))
                    start = stop
                # What is skipped belongs to the next file.
                override = NO_OVERRIDE
            offset = self._end = stop
        self._damage.append(self._locate(offset, "cut short, the end mark is missing"))

    def _sparse_map_bytes(self, offset: int, header: MemberHeader) -> int:
        """Return the size of the blocks between a GNU sparse header and its data."""
        blocks, is_continued = 0, header.has_sparse_map
        while is_continued:
            blocks += 1
            block = self._read(offset + blocks * BLOCK, BLOCK)
            is_continued = len(block) == BLOCK and bool(block[_IS_CONTINUED])
        return blocks * BLOCK

    def _check_end_mark(self, offset: int) -> None:
        """Record an end mark of one block instead of two; readers stop at the first."""
        mark = self._read(offset, len(END_MARK))
        if mark != END_MARK:
            is_short = len(mark) < len(END_MARK)
            fault = "cut short, the end mark is incomplete" if is_short else "damaged end mark"
            self._irregularities.append(self._locate(offset, fault))
        first = offset + len(END_MARK)
        rest = self._tar.pread(_AFTER_END, first)
        used = len(rest) - len(rest.lstrip(b"\0"))
        start = used // BLOCK * BLOCK
        if rest[start + 257 : start + 262] == b"ustar":
            fault = "another archive follows the end mark, and is not read; join shards by tar -A"
            self._damage.append(self._locate(first + start, fault))

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
            self._buffer = self._tar.pread(_READ_AHEAD, offset)
            self._buffer_start, at = offset, 0
        return self._buffer[at : at + size]
