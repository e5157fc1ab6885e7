"""Selects the files to pack by their extensions, and counts those that are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeVar

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

_KINDS = {
    ".avif": "avif",
    ".bmp": "bmp",
    ".dib": "bmp",
    ".gif": "gif",
    ".heic": "heic",
    ".heif": "heic",
    ".hif": "heic",
    ".j2c": "jp2",
    ".j2k": "jp2",
    ".jp2": "jp2",
    ".jpc": "jp2",
    ".jpf": "jp2",
    ".jpx": "jp2",
    ".tif": "tiff",
    ".tiff": "tiff",
}
"""The kind of each extension that ``--convert`` packs."""

CONVERTED_SUFFIXES = frozenset(_KINDS)
HEIC_SUFFIXES = frozenset(suffix for suffix, kind in _KINDS.items() if kind == "heic")
CONVERTED_KINDS = frozenset(_KINDS.values())

_MAX_NAMED = 3

_Entry = TypeVar("_Entry")


@dataclass
class SkippedKind:
    """How many files of a kind were skipped, and the ``first`` of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)


class FileSelection:
    """Selects the images of a source; counts all other files but captions by kind."""

    def __init__(self, *, convert: bool) -> None:
        self._suffixes = IMAGE_SUFFIXES | CONVERTED_SUFFIXES if convert else IMAGE_SUFFIXES
        self._skipped: dict[str, SkippedKind] = {}

    @property
    def skipped(self) -> dict[str, SkippedKind]:
        """The skipped files by kind, the most frequent kind first."""
        return dict(sorted(self._skipped.items(), key=lambda item: (-item[1].count, item[0])))

    def images(self, entries: Sequence[tuple[str, _Entry]]) -> Iterator[_Entry]:
        """Yield the entries of images; ``entries`` are names and what they stand for.

        A ``.txt`` file next to any other file of its name is a caption, and not counted.
        """
        described = {
            _stem(name) for name, _ in entries if PurePosixPath(name).suffix.lower() != ".txt"
        }
        for name, entry in entries:
            suffix = PurePosixPath(name).suffix.lower()
            if suffix in self._suffixes:
                yield entry
            elif suffix != ".txt" or _stem(name) not in described:
                self._skip(name, suffix)

    def _skip(self, name: str, suffix: str) -> None:
        kind = _KINDS.get(suffix, suffix.removeprefix(".") or "no extension")
        skipped = self._skipped.setdefault(kind, SkippedKind())
        skipped.count += 1
        if len(skipped.first) < _MAX_NAMED:
            skipped.first.append(name)


def _stem(name: str) -> str:
    return name.removesuffix(PurePosixPath(name).suffix)


def describe_skipped(skipped: dict[str, SkippedKind]) -> Iterable[str]:
    """Yield a line for each kind of skipped files."""
    for kind, files in skipped.items():
        more = ", …" if files.count > len(files.first) else ""
        hint = "; --convert packs them" if kind in CONVERTED_KINDS else ""
        yield f"skipped {files.count:,}: {kind}: {', '.join(files.first)}{more}{hint}"
