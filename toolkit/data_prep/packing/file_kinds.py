"""Selects the files to pack by pattern and extension, and counts those that are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from sm_train.entrypoints.data_prep.packing.plan import CAPTION_SUFFIXES, IMAGE_SUFFIXES

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

MAX_NAMED = 3

_WILDCARDS = "*?["

_Entry = TypeVar("_Entry")


@dataclass
class SkippedKind:
    """How many files of a kind were skipped, and the ``first`` of them by name."""

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

        A caption next to any other file of its name is not counted, if no other is used.
        """
        described = {stem(name) for name, _ in entries if not is_text(name)}
        names = {name for name, _ in entries}
        for name, entry in entries:
            if self.is_image(name):
                yield entry
            elif not is_text(name) or stem(name) not in described or _is_second(name, names):
                self.skip(name)

    def is_image(self, name: str) -> bool:
        """Return whether the file is to be packed, by its extension."""
        return PurePosixPath(name).suffix.lower() in self._suffixes

    def skip(self, name: str) -> None:
        """Count a file that is neither an image nor a caption."""
        suffix = PurePosixPath(name).suffix.lower()
        self._count(_KINDS.get(suffix, suffix.removeprefix(".") or "no extension"), 1, [name])

    def skip_texts(self, suffix: str, count: int, first: list[str]) -> None:
        """Count files that are the caption of no image; ``first`` are the names of some."""
        if count:
            self._count(suffix.removeprefix("."), count, first)

    def _count(self, kind: str, count: int, names: list[str]) -> None:
        skipped = self._skipped.setdefault(kind, SkippedKind())
        skipped.count += count
        # By name: folders of S3 are listed in parallel.
        skipped.first = sorted([*skipped.first, *names])[:MAX_NAMED]


def is_text(name: str) -> bool:
    """Return whether the file may be a caption."""
    return PurePosixPath(name).suffix.lower() in CAPTION_SUFFIXES


def _is_second(name: str, names: set[str]) -> bool:
    """Return whether the image of a caption has another one that is used."""
    first, second = CAPTION_SUFFIXES
    return name.endswith(second) and f"{stem(name)}{first}" in names


def stem(name: str) -> str:
    """Return a name without its extension."""
    return name.removesuffix(PurePosixPath(name).suffix)


def describe_skipped(skipped: dict[str, SkippedKind]) -> Iterable[str]:
    """Yield a line for each kind of skipped files."""
    for kind, files in skipped.items():
        more = ", …" if files.count > len(files.first) else ""
        hint = "; --convert packs them" if kind in CONVERTED_KINDS else ""
        yield f"skipped {files.count:,}: {kind}: {', '.join(files.first)}{more}{hint}"


def is_pattern(source: str) -> bool:
    """Return whether a path has wildcards."""
    return any(wildcard in source for wildcard in _WILDCARDS)


def fixed_part(pattern: str) -> Path:
    """Return the folder above the first wildcard of a pattern."""
    parts = Path(pattern).parts
    return Path(*parts[: next(number for number, part in enumerate(parts) if is_pattern(part))])


def matching_files(pattern: str) -> Iterator[Path]:
    """Yield the paths that match a pattern, in any order."""
    root = fixed_part(pattern)
    yield from root.glob(str(Path(pattern).relative_to(root)))
