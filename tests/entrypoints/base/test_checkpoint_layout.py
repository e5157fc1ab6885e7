"""Names of a checkpoint's folder and files, and its marker."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    CheckpointFile,
    CheckpointMarker,
    MarkerError,
    is_shard_file,
    parse_step_folder,
    shard_bytes,
    shard_file_name,
    step_folder_name,
    step_folders,
)


@given(st.integers(0, 10**12))
def test_step_folder_name_parses_back(step: int) -> None:
    assert parse_step_folder(step_folder_name(step)) == step


@pytest.mark.parametrize("name", ["step-1", "step-00000001x", "step-", "final", "samples"])
def test_other_folder_names_have_no_step(name: str) -> None:
    assert parse_step_folder(name) is None


def test_step_folders_are_newest_first(tmp_path: Path) -> None:
    for name in ("step-00000009", "step-00000010", "step-123456789", "step-x", "final"):
        (tmp_path / name).mkdir()
    names = [folder.name for folder in step_folders(tmp_path)]
    assert names == ["step-123456789", "step-00000010", "step-00000009"]


def test_only_shard_files_count_as_shard_bytes() -> None:
    files = [
        CheckpointFile(shard_file_name(0), 5, ""),
        CheckpointFile(shard_file_name(123456), 7, ""),
        CheckpointFile("data.npz", 100, ""),
    ]
    assert [is_shard_file(file.name) for file in files] == [True, True, False]
    assert shard_bytes(files) == 12


def test_marker_parses_back_with_files_sorted() -> None:
    files = (CheckpointFile("b", 2, "y"), CheckpointFile("a", 1, "x"))
    marker = CheckpointMarker(7, 2, "abc", files)
    parsed = CheckpointMarker.parse(marker.to_json().encode())
    assert parsed == CheckpointMarker(7, 2, "abc", files[::-1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "complete.json is damaged"),
        (b"[]", "complete.json is damaged"),
        (b'{"format": 4, "step": 1}', "complete.json is damaged"),
        (b'{"format": 1}', "format 1, this version reads 4"),
    ],
)
def test_unusable_marker_is_an_error(content: bytes, message: str) -> None:
    with pytest.raises(MarkerError, match=message):
        CheckpointMarker.parse(content)
