"""User code: the files below ``code:`` that go into the bundle next to the training code."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pathspec import GitIgnoreSpec

IGNORE_FILE = ".smtrainignore"
REQUIREMENTS = "requirements.txt"

# Files that no job needs, and that most often contain secrets.
_ALWAYS_IGNORED = (
    IGNORE_FILE,
    ".*",
    "__pycache__/",
    "*.py[co]",
    "*.egg-info/",
    "venv/",
    "node_modules/",
    "local-runs/",
)

_PROVIDED_BY_IMAGE = {"torch", "torchvision", "torchaudio"}


class UserCodeError(ValueError):
    """The user code cannot go into a bundle; the message has one line for each mistake."""


@dataclass(frozen=True)
class UserCode:
    """Files by their path in the bundle; ``packages`` are lines of requirements.txt."""

    files: dict[str, bytes] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


def read_user_code(folder: Path) -> UserCode:
    """Read the files below ``folder``, except those that its .smtrainignore excludes.

    The syntax is that of .gitignore.

    Raises:
        UserCodeError: the folder does not exist, or its requirements.txt has a mistake.
    """
    if not folder.is_dir():
        raise UserCodeError(f"code: {folder}: no such folder; it is relative to the run file")
    ignore_file = folder / IGNORE_FILE
    lines = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.is_file() else []
    spec = GitIgnoreSpec.from_lines([*_ALWAYS_IGNORED, *lines])
    files = {name: (folder / name).read_bytes() for name in sorted(_file_names(folder, spec))}
    text = files.pop(REQUIREMENTS, b"").decode("utf-8", "replace")
    return UserCode(files, _parse_requirements(text, folder / REQUIREMENTS))


def module_paths(module: str) -> tuple[str, str]:
    """Return the paths in the folder of code where a module may be, the first one first."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def defined_names(source: bytes) -> set[str] | None:
    """Return the names that a module defines at its top level; None if it imports any (``*``).

    Raises:
        SyntaxError: it is not Python.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "*" in names else names


def _file_names(folder: Path, spec: GitIgnoreSpec) -> Iterator[str]:
    """Yield the paths of the included files, without descending into excluded folders."""
    root = folder.resolve()
    for current, subfolders, names in os.walk(folder):
        relative = Path(current).relative_to(folder)
        for name in (*subfolders, *names):
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise UserCodeError(
                    f"code: {Path(current, name)}: the name is not UTF-8; rename it"
                )
        # os.walk descends into the folders that stay in this list.
        subfolders[:] = [
            name for name in subfolders if not spec.match_file(f"{(relative / name).as_posix()}/")
        ]
        for name in subfolders:
            if Path(current, name).is_symlink():
                raise UserCodeError(
                    f"code: {Path(current, name)} is a link to a folder, which is not followed; "
                    f"copy the folder, or exclude it in {IGNORE_FILE}"
                )
        for name in names:
            path = (relative / name).as_posix()
            if not spec.match_file(path) and (folder / path).is_file():
                _require_inside(root, folder / path)
                yield path


def _require_inside(root: Path, path: Path) -> None:
    """Reject a link to a file outside the code: its content would leave the laptop unnoticed."""
    if not path.resolve().is_relative_to(root):
        raise UserCodeError(
            f"code: {path} is a link to {path.resolve()}, outside the folder; copy the file, or "
            f"exclude it in {IGNORE_FILE}"
        )


def _parse_requirements(text: str, path: Path) -> tuple[str, ...]:
    """Return the requirements; each must name one exact version, so that restarts install it."""
    lines, errors = [], []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        error = None if line.startswith("-") else _requirement_error(line)
        if error:
            errors.append(f"{path}:{number}: {error}")
        lines.append(line)
    if errors:
        raise UserCodeError("\n".join(errors))
    return tuple(lines)


def _requirement_error(line: str) -> str | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return "not a requirement that pip can parse; write name==1.2.3"
    if canonicalize_name(requirement.name) in _PROVIDED_BY_IMAGE:
        return (
            f"{requirement.name} is part of the image; select its version with "
            "cluster.framework_version"
        )
    exact = [part for part in requirement.specifier if part.operator in ("==", "===")]
    if requirement.url is None and not any("*" not in part.version for part in exact):
        return f"{requirement.name} has no exact version; write {requirement.name}==1.2.3"
    return None
