"""Patterns of files, such as ``photos/**/*.jpg``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_WILDCARDS = "*?["


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
