"""Which checkpoint a starting job resumes from; exchange between nodes: tests/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.async_checkpointer import CheckpointRank
from sm_train.entrypoints.checkpoints.resume_point import Nodes, find_latest, remove_later
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    FormatError,
    step_folder_name,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.entrypoints.checkpoints.checkpoint_files_support import (
    flip_last_bit,
    set_format,
    write_checkpoint,
)

ALONE = Nodes(CheckpointRank(0, 1, 0, 0, 1), lambda value: [value], torch.device("cpu"))


def steps(checkpoints: Path) -> list[str]:
    return sorted(folder.name for folder in checkpoints.iterdir())


def test_newest_intact_checkpoint_is_found_and_later_ones_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    checkpoint_files.invalidate(tmp_path / step_folder_name(40))
    [damaged] = (tmp_path / step_folder_name(30)).glob("*.safetensors")
    flip_last_bit(damaged)
    messages: list[str] = []
    latest = find_latest(tmp_path, ALONE, lambda code, message: messages.append(message))
    assert latest is not None
    assert latest.step == 20
    assert [message.split(":")[0] for message in messages] == [
        "step-00000040 is skipped",
        "step-00000030 is skipped",
    ]
    # Training writes these steps again, and no stale file may mix with the new ones.
    remove_later(tmp_path, latest.step)
    assert steps(tmp_path) == ["step-00000010", "step-00000020"]


def test_without_a_usable_checkpoint_only_incomplete_ones_are_removed(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step)
    [damaged] = (tmp_path / step_folder_name(10)).glob("*.safetensors")
    flip_last_bit(damaged)
    checkpoint_files.invalidate(tmp_path / step_folder_name(20))
    assert find_latest(tmp_path, ALONE, lambda code, message: None) is None
    remove_later(tmp_path, None)
    assert steps(tmp_path) == ["step-00000010"]


def test_checkpoint_of_another_format_stops_the_job(tmp_path: Path) -> None:
    """Training from the start would cost money, and remove the checkpoints in the end."""
    for step in (10, 20):
        write_checkpoint(tmp_path, step)
    set_format(tmp_path / step_folder_name(20) / MARKER, 5)
    with pytest.raises(FormatError, match="format 5, this version reads 4: resume it with the"):
        find_latest(tmp_path, ALONE, lambda code, message: None)
    assert steps(tmp_path) == ["step-00000010", "step-00000020"]


def test_a_node_without_the_checkpoint_gets_all_of_it(tmp_path: Path) -> None:
    """A replaced node has no folder of the step. Of two nodes only this one is a process: the
    collectives of a fake group leave zeros, as which the other node's file is.
    """
    saved = tmp_path / "other"
    saved.mkdir()
    file = checkpoint_files.write_file(saved, "weights", checkpoint_files.save_bytes(bytes(5000)))
    checkpoint_files.write_marker(saved, 10, 2, "", [file])
    marker = (saved / MARKER).read_bytes()
    of_the_other = iter([[10], marker, (0, {}), 0, ""])
    nodes = Nodes(
        CheckpointRank(1, 2, 1, 0, 1),
        lambda value: [next(of_the_other), value],
        torch.device("cpu"),
    )
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        found = find_latest(tmp_path / "own", nodes, lambda code, message: None)
    finally:
        torch.distributed.destroy_process_group()
    assert found is not None
    assert (found.folder / "weights").read_bytes() == bytes(5000)
    assert (found.folder / MARKER).read_bytes() == marker
