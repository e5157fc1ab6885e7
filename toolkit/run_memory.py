"""Remembers that a run file is valid, so that pricing it again needs neither pydantic nor YAML.

Building the typed models takes four times as long as the price itself. What was validated is kept
as JSON under a digest of the file's bytes and of the code that judged it: other bytes or another
sm-train look again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from sm_train.entrypoints.files import write_whole
from sm_train.estimators.model_presets import entrypoints_folder, estimators_folder
from sm_train.toolkit.files import cache_folder

if TYPE_CHECKING:
    from sm_train.estimators.run_config import RunConfig

_KEPT = 50
"""Run files remembered; the oldest go first."""


def recall_run(path: Path) -> RunConfig:
    """The validated run file ``path``, for reading its values only.

    Raises:
        RunFileError: as :func:`~sm_train.estimators.run_file.load_run`.
    """
    memory = None
    try:
        memory = _memory(path.read_bytes())
        values: Any = json.loads(memory.read_bytes(), object_hook=_namespace)
    except (OSError, ValueError):
        return _load(path, memory)
    return cast("RunConfig", values)


def _load(path: Path, memory: Path | None) -> RunConfig:
    from sm_train.estimators.run_file import load_run

    config = load_run(path)
    if memory is not None:
        # A folder that cannot be written costs the time alone.
        with suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_whole(memory, config.model_dump_json().encode())
            _forget(memory.parent)
    return config


def _memory(content: bytes) -> Path:
    digest = hashlib.sha256(content)
    code = sorted(estimators_folder().glob("run_*.py"))
    for judge in (*code, entrypoints_folder() / "presets"):
        status = judge.stat()
        digest.update(f"{judge} {status.st_mtime_ns} {status.st_size}\n".encode())
    return cache_folder() / "runs" / f"{digest.hexdigest()}.json"


def _forget(folder: Path) -> None:
    by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in by_age[:-_KEPT]:
        path.unlink(missing_ok=True)


def _namespace(mapping: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**mapping)
