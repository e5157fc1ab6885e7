"""Read the texts of files for the search for credentials: encodings and archives."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsRead

MAX_UNPACKED = 256 * 2**20
MAX_DEPTH = 4
"""Bytes and levels of nested archives that are unpacked, so that an archive bomb ends early."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the start of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_COMPRESSED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))
_NOT_SEARCHED = {
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"\x04\x22\x4d\x18": "an LZ4 file",
}
_DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    NotImplementedError,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
_SAMPLE_BYTES = 4096
_STRINGS = re.compile(rb"[\t\x20-\x7e]{8,}")


class UnreadableArchiveError(Exception):
    """An archive whose files cannot be searched; the message names its kind."""


class _Budget:
    """The bytes that may still be unpacked from one file."""

    def __init__(self) -> None:
        self._left = MAX_UNPACKED

    def read(self, file: SupportsRead[bytes]) -> bytes:
        content = file.read(self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise UnreadableArchiveError(
                f"an archive of more than {MAX_UNPACKED // 2**20} MiB unpacked"
            )
        return content


def expand(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Yield path and text of a file; of an archive, those of the files in it.

    Raises:
        UnreadableArchiveError: an archive is encrypted, damaged, nested too deeply or too large.
    """
    yield from _expand(name, content, MAX_DEPTH, _Budget())


def _expand(name: str, content: bytes, depth: int, budget: _Budget) -> Iterator[tuple[str, str]]:
    for magic, kind in _NOT_SEARCHED.items():
        if content.startswith(magic):
            raise UnreadableArchiveError(kind)
    try:
        members = _members(content, budget)
        for member, inner in members or ():
            if depth == 0:
                raise UnreadableArchiveError(f"an archive nested in {MAX_DEPTH} others")
            yield from _expand(f"{name}/{member}".rstrip("/"), inner, depth - 1, budget)
    except _DAMAGED as error:
        raise UnreadableArchiveError("a damaged archive") from error
    except RuntimeError as error:  # zipfile's for an encrypted member
        raise UnreadableArchiveError("an encrypted archive") from error
    if members is None:
        yield name, _decode(content)


def _members(content: bytes, budget: _Budget) -> Iterator[tuple[str, bytes]] | None:
    """Return path and content of an archive's files, or None if ``content`` is no archive."""
    for magic, open_compressed in _COMPRESSED:
        if content.startswith(magic):
            with open_compressed(io.BytesIO(content)) as file:
                return iter([("", budget.read(file))])
    # A zip application starts with the line of its interpreter.
    is_application = content.startswith(b"#!") and zipfile.is_zipfile(io.BytesIO(content))
    if is_application or content.startswith(b"PK\x03\x04"):
        return _zip_members(content, budget)
    if content[257:262] == b"ustar":
        return _tar_members(content, budget)
    return None


def _zip_members(content: bytes, budget: _Budget) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as file:
                    yield member.filename, budget.read(file)


def _tar_members(content: bytes, budget: _Budget) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield member.name, budget.read(file)


def _decode(content: bytes) -> str:
    """Return the text of a file; of one that is not text, its strings (as strings(1) finds them).

    Searching 50 MB of weights as if they were text would take half a minute.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            return content.decode(encoding, "replace")
    sample = content[:_SAMPLE_BYTES]
    # ASCII in UTF-16 has a zero in every other byte; in UTF-32, two zeros follow.
    if sample and sample[1::2].count(0) > 0.8 * len(sample[1::2]) > 0:
        return content.decode("utf-16-le", "replace").replace("\0", "")
    if sample and sample[::2].count(0) > 0.8 * len(sample[::2]) > 0:
        return content.decode("utf-16-be", "replace").replace("\0", "")
    if b"\0" in sample:
        return b"\n".join(_STRINGS.findall(content)).decode("ascii")
    return content.decode("utf-8", "replace")
