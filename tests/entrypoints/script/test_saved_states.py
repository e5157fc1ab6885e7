"""Folders of ``save_state``: which count, which one is the newest, and which are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from sm_train.entrypoints.script import saved_states
from sm_train.entrypoints.script.saved_states import SavedState


def save(checkpoints: Path, name: str, step: int, *, complete: bool = True) -> Path:
    folder = checkpoints / name
    existed = folder.exists()
    saved_states.begin(checkpoints, name)
    assert folder.exists() == existed
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "optimizer.bin").write_bytes(b"o" * step)
    (folder / "shards").mkdir(exist_ok=True)
    (folder / "shards" / "0.distcp").write_bytes(b"s")
    if complete:
        files = saved_states.list_files(folder)
        saved_states.mark_complete(checkpoints, name, step, 2, files)
    return folder


def test_newest_complete_state_is_found_whatever_the_script_calls_it(tmp_path: Path) -> None:
    save(tmp_path, "epoch_1", 900)
    save(tmp_path, "checkpoints/checkpoint_0", 50)
    save(tmp_path, "checkpoint-1000", 1000, complete=False)
    assert saved_states.complete_states(tmp_path) == [
        SavedState("epoch_1", 900),
        SavedState("checkpoints/checkpoint_0", 50),
    ]


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "nested", "marker"])
def test_damaged_state_is_passed_over_and_removed(tmp_path: Path, damage: str) -> None:
    save(tmp_path, "checkpoint-5", 5)
    newest = save(tmp_path, "checkpoint-10", 10)
    file = newest / "optimizer.bin"
    if damage == "cut":
        file.write_bytes(b"o")
    elif damage == "flipped":
        file.write_bytes(b"x" * 10)
    elif damage == "missing":
        file.unlink()
    elif damage == "nested":
        (newest / "shards" / "0.distcp").write_bytes(b"")
    else:
        (newest / "complete.json").write_bytes(b"{")
    states = saved_states.complete_states(tmp_path)
    assert states == [SavedState("checkpoint-5", 5)]
    assert saved_states.remove_incomplete(tmp_path, states) == ["checkpoint-10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5"]


def test_states_that_were_copied_here_are_kept(tmp_path: Path) -> None:
    """They have no marker, and no complete one next to them is older."""
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "optimizer.bin").touch()
    assert saved_states.remove_incomplete(tmp_path, []) == []
    save(tmp_path, "checkpoint-9", 9)
    assert saved_states.remove_incomplete(tmp_path, [SavedState("checkpoint-9", 9)]) == []
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-11" / "random_states_3.pkl").touch()
    removed = saved_states.remove_incomplete(tmp_path, [SavedState("checkpoint-9", 9)])
    assert removed == ["checkpoint-11"]


def test_saving_to_the_same_folder_again_makes_it_incomplete_first(tmp_path: Path) -> None:
    save(tmp_path, "last", 5)
    save(tmp_path, "last", 8, complete=False)
    assert saved_states.complete_states(tmp_path) == []
    save(tmp_path, "last", 8)
    assert saved_states.complete_states(tmp_path) == [SavedState("last", 8)]


def test_last_checkpoint_follows_the_names_of_the_script() -> None:
    assert saved_states.name_for_step(SavedState("a/step_50", 50), 57) == "a/step_57"
    assert saved_states.name_for_step(SavedState("epoch_2", 50), 57) is None
    assert saved_states.name_for_step(SavedState("last", 50), 57) is None
