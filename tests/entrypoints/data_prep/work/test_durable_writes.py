"""What survives a power cut: content is flushed before its name, and names before what follows."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sm_train.entrypoints.base.atomic_write import durable_replace
from sm_train.entrypoints.storage.lease_files import LocalLeaseFiles
from sm_train.entrypoints.storage.storage import LocalFolder, write_file
from sm_train.toolkit.data_prep.packing.index import _replace as replace_local_index


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The flushes, names and removals of this process, in order."""
    recorded: list[tuple[str, str]] = []

    def record(name: str, target: Callable[..., str]) -> None:
        original = getattr(os, name)

        def recording(*arguments: object, **options: object) -> object:
            recorded.append((name, target(*arguments)))
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, recording)

    def of_descriptor(descriptor: int) -> str:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        return "folder" if path.is_dir() else "file"

    record("fsync", of_descriptor)
    for name in ("replace", "link"):
        record(name, lambda source, target: Path(target).name)
    return recorded


def new_file(folder: Path) -> None:
    write_file(LocalFolder(folder), "index.parquet", b"new")


def new_lease(folder: Path) -> None:
    assert LocalLeaseFiles(folder).write_if("index.parquet", b"new", version=None)


def replaced_index(folder: Path) -> None:
    storage = LocalFolder(folder)
    (folder / "index.parquet").write_bytes(b"old")
    version = storage.version("index.parquet")
    assert storage.replace_if("index.parquet", io.BytesIO(b"new"), version)


def renamed(folder: Path) -> None:
    (folder / "temporary").write_bytes(b"new")
    durable_replace(folder / "temporary", folder / "index.parquet")


def index_of_the_command(folder: Path) -> None:
    plan: Any = SimpleNamespace(storage=LocalFolder(folder), index_file="index.parquet")
    replace_local_index(plan, io.BytesIO(b"new"))


@pytest.mark.parametrize(
    "write", [index_of_the_command, new_file, new_lease, replaced_index, renamed]
)
def test_content_is_flushed_before_its_name_and_the_name_afterwards(
    write: Callable[[Path], None], tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    """`remove` deletes old shards after this, and `index` says that the file is up to date."""
    write(tmp_path)
    named = [call for call in calls if call[0] != "fsync"]
    assert named in ([("replace", "index.parquet")], [("link", "index.parquet")])
    assert calls == [("fsync", "file"), *named, ("fsync", "folder")]
    assert (tmp_path / "index.parquet").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["index.parquet"]
