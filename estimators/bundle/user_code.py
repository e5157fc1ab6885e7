"""The user's own code: the files of ``code:`` that go into the bundle beside the training code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pathspec import GitIgnoreSpec

IGNORE_FILE = ".smtrainignore"
REQUIREMENTS = "requirements.txt"

# What no job needs, and what most often holds secrets.
_NEVER = (
    IGNORE_FILE,
    ".*",
    "__pycache__/",
    "*.py[co]",
    "*.egg-info/",
    "venv/",
    "node_modules/",
    "local-runs/",
)

_OF_THE_IMAGE = {"torch", "torchvision", "torchaudio"}


class CodeError(ValueError):
    """The user's code cannot go into a bundle; the message has one line for each mistake."""


@dataclass(frozen=True)
class UserCode:
    """Files by their path in the bundle; ``packages`` are lines of requirements.txt."""

    files: dict[str, bytes] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


def read_code(folder: Path) -> UserCode:
    """Read the files below ``folder`` that its .smtrainignore, written as a .gitignore, leaves in.

    Raises:
        CodeError: no such folder, or its requirements cannot be installed beside ours.
    """
    if not folder.is_dir():
        raise CodeError(f"code: {folder}: no such folder; it is relative to the run file")
    ignore = folder / IGNORE_FILE
    lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
    spec = GitIgnoreSpec.from_lines([*_NEVER, *lines])
    files = {name: (folder / name).read_bytes() for name in sorted(_names(folder, spec))}
    packages = files.pop(REQUIREMENTS, b"").decode("utf-8", "replace")
    return UserCode(files, _checked(packages, folder / REQUIREMENTS))


def _names(folder: Path, spec: GitIgnoreSpec) -> Iterator[str]:
    """Paths of the files that stay; a folder that is left out is not even looked into."""
    for where, folders, names in os.walk(folder):
        above = Path(where).relative_to(folder)
        folders[:] = [
            name for name in folders if not spec.match_file(f"{(above / name).as_posix()}/")
        ]
        for name in folders:
            if Path(where, name).is_symlink():
                raise CodeError(
                    f"code: {Path(where, name)} is a link to a folder, which stays behind; copy "
                    f"the folder, or leave it out by {IGNORE_FILE}"
                )
        for name in names:
            path = (above / name).as_posix()
            if not spec.match_file(path) and (folder / path).is_file():
                yield path


def _checked(text: str, place: Path) -> tuple[str, ...]:
    """The lines, each of which names one exact version: every restart installs the same."""
    kept, mistakes = [], []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        mistake = None if line.startswith("-") else _mistake(line)
        if mistake:
            mistakes.append(f"{place}:{number}: {mistake}")
        kept.append(line)
    if mistakes:
        raise CodeError("\n".join(mistakes))
    return tuple(kept)


def _mistake(line: str) -> str | None:
    try:
        one = Requirement(line)
    except InvalidRequirement:
        return "not a requirement that pip reads; write name==1.2.3"
    if canonicalize_name(one.name) in _OF_THE_IMAGE:
        return f"{one.name} is the image's own; choose it by cluster.framework_version"
    exact = [part for part in one.specifier if part.operator in ("==", "===")]
    if one.url is None and not any("*" not in part.version for part in exact):
        return f"{one.name} has no exact version; write {one.name}==1.2.3"
    return None


def merged(ours: str, theirs: tuple[str, ...]) -> str:
    """Our pinned packages and the user's; where both name one, the user's version counts."""
    if not theirs:
        return ours
    names = {_name(line) for line in theirs}
    kept = [line for line in ours.splitlines() if not _name(line) or _name(line) not in names]
    return "\n".join([*kept, OWN_PACKAGES, *theirs]) + "\n"


OWN_PACKAGES = "# The run's own:"
"""Stands above the user's packages in a bundle's requirements."""


def _name(line: str) -> str | None:
    """The package that a line of requirements names, if it names one."""
    if not line.strip() or line.startswith(("#", "-")):
        return None
    return canonicalize_name(Requirement(line).name)
