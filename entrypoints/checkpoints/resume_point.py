"""The checkpoint that a starting job resumes from: agreed by all nodes, verified on each.

SageMaker downloads the whole S3 prefix to every node before a job starts. A node's copy may still
lack files or hold damaged ones. So every node verifies its own copy, a checkpoint is usable if the
nodes together hold all of its files, and nodes get what they lack from the others over the process
group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.async_checkpointer import AllGatherObject, CheckpointRank
from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError, CheckpointInfo
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    FormatError,
    MarkerError,
    newest_complete,
    parse_step_folder,
    step_folder_name,
    step_folders,
)

BROADCAST_BYTES = 2**26
"""Files move between nodes in blocks of this size, which bounds the memory that it takes."""


@dataclass(frozen=True)
class Nodes:
    """This process among those of all nodes, and how they exchange objects and files.

    ``device`` is where collectives take tensors.
    """

    rank: CheckpointRank
    all_gather: AllGatherObject
    device: torch.device


@dataclass(frozen=True)
class _Copies:
    """Where the files of one checkpoint, with its marker, are intact: file name → node ranks."""

    marker: CheckpointMarker
    content: bytes
    holders: dict[str, set[int]]
    reasons: dict[str, str]
    """File name → what is wrong with it on a node, for each file that a node lacks."""

    @property
    def lost(self) -> list[str]:
        """The reason for each file that no node holds."""
        return [self.reasons[name] for name, holders in self.holders.items() if not holders]


def find_latest(
    checkpoints: Path, nodes: Nodes, warn: Callable[[str, str], None]
) -> CheckpointInfo | None:
    """Return the newest usable checkpoint, whole in this node's folder; None if there is none.

    A collective. ``warn`` takes a code and a message; it is called on rank 0 for each newer
    checkpoint that is skipped, and for files that are copied between nodes.

    Raises:
        FormatError: a checkpoint is of another format.
        CheckpointError: files changed while they were copied between nodes.
    """
    surveyed: dict[str, _Copies] = {}

    def examine(name: str) -> tuple[CheckpointMarker | None, str]:
        try:
            copies = surveyed[name] = _survey(checkpoints / name, nodes)
        except FormatError:
            raise
        except CheckpointError as error:
            return None, str(error)
        return (None, copies.lost[0]) if copies.lost else (copies.marker, "")

    newest = newest_complete(_step_names(checkpoints, nodes), examine)
    if nodes.rank.rank == 0:
        for name, problem in newest.skipped:
            warn("checkpoint-skipped", f"{name} is skipped: {problem}")
    if newest.name is None or newest.marker is None:
        return None
    folder, copies = checkpoints / newest.name, surveyed[newest.name]
    if copies.reasons:
        if nodes.rank.rank == 0:
            reason = next(iter(copies.reasons.values()))
            message = f"{newest.name}: copying {len(copies.reasons)} files between nodes: {reason}"
            warn("checkpoint-files-copied", message)
        _copy_between_nodes(folder, copies, nodes)
    marker = newest.marker
    return CheckpointInfo(folder, marker.step, marker.world_size, marker.fingerprint)


def remove_later(checkpoints: Path, step: int | None) -> None:
    """Remove what this node holds of checkpoints after ``step``; call it on one of its ranks.

    Training writes these steps again. Without this, a node would keep the other nodes' files of
    the earlier attempt, which it got at the start, and SageMaker might upload them again. If None
    was resumed, only folders without a marker are removed.
    """
    for folder in step_folders(checkpoints):
        number = parse_step_folder(folder.name) or 0
        if number > step if step is not None else not (folder / MARKER).exists():
            checkpoint_files.remove(folder)


def _step_names(checkpoints: Path, nodes: Nodes) -> list[str]:
    """Return the names of the step folders that any node has."""
    own = [parse_step_folder(folder.name) or 0 for folder in step_folders(checkpoints)]
    steps = {step for of_rank in nodes.all_gather(own) for step in of_rank}
    return [step_folder_name(step) for step in sorted(steps)]


def _survey(folder: Path, nodes: Nodes) -> _Copies:
    """Verify every node's copy of a checkpoint; the ranks of a node divide the reading.

    Raises:
        CheckpointError: no node has a valid marker.
    """
    rank = nodes.rank
    marker, content = _agree_on_marker(folder, nodes)
    problems: dict[str, str] = {}
    for file in marker.files[rank.local_rank :: rank.local_world_size]:
        try:
            checkpoint_files.check_file(folder, file)
        except (CheckpointError, OSError) as error:
            problems[file.name] = str(error)
    if rank.local_main and _read(folder / MARKER) != content:
        problems[MARKER] = f"{folder}: {MARKER} is missing or differs"
    surveyed = nodes.all_gather((rank.node_rank, problems))
    every_node = {node for node, _ in surveyed}
    holders = {name: set(every_node) for name in [*(file.name for file in marker.files), MARKER]}
    reasons: dict[str, str] = {}
    for node, problems in surveyed:
        for name, reason in problems.items():
            holders[name].discard(node)
            reasons.setdefault(name, f"{reason} on node {node}")
    return _Copies(marker, content, holders, reasons)


def _agree_on_marker(folder: Path, nodes: Nodes) -> tuple[CheckpointMarker, bytes]:
    """Return the first valid marker in the order of nodes, and its content.

    Raises:
        CheckpointError: there is none.
        FormatError: it is of another format.
    """
    own = _read(folder / MARKER) if nodes.rank.local_main else None
    reason = f"{folder}: incomplete (no {MARKER})"
    for content in nodes.all_gather(own):
        if content is None:
            continue
        try:
            return CheckpointMarker.parse(content), content
        except FormatError as error:
            raise FormatError(
                f"{folder}: {error}: resume it with the version that wrote it, or give the run "
                "another name"
            ) from None
        except MarkerError as error:
            reason = f"{folder}: {error}"
    raise CheckpointError(reason)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _copy_between_nodes(folder: Path, copies: _Copies, nodes: Nodes) -> None:
    """Copy each file to the nodes that lack it, from the first node that holds it.

    Raises:
        CheckpointError: a file changed meanwhile.
    """
    rank = nodes.rank
    node_ranks = nodes.all_gather(rank.node_rank)
    main_ranks = {node: node_ranks.index(node) for node in node_ranks}
    problem = ""
    for file in copies.marker.files:
        holders = copies.holders[file.name]
        if holders == main_ranks.keys():
            continue
        source = main_ranks[min(holders)]
        blocks = _broadcast_file(folder / file.name, file.bytes, source, nodes)
        if rank.local_main and rank.node_rank not in holders:
            folder.mkdir(parents=True, exist_ok=True)
            written = checkpoint_files.write_file(folder, file.name, partial(_write_blocks, blocks))
            if written != file:
                problem = f"{folder}: {file.name} changed while it was copied between nodes"
        else:
            for _ in blocks:
                pass
    if rank.local_main and rank.node_rank not in copies.holders[MARKER] and not problem:
        checkpoint_files.write_file(folder, MARKER, checkpoint_files.save_bytes(copies.content))
    # The other ranks of this node read the files next: the exchange is also a barrier.
    problems = [reported for reported in nodes.all_gather(problem) if reported]
    if problems:
        raise CheckpointError(problems[0])


def _broadcast_file(path: Path, size: int, source: int, nodes: Nodes) -> Iterator[bytes]:
    """Yield the blocks of the file on rank ``source``, on every rank.

    A collective: all ranks iterate to the end. Tensors on the device, because SMDDP moves no
    others and takes no objects.
    """
    import torch.distributed as dist

    is_source = nodes.rank.rank == source
    with path.open("rb") if is_source else contextlib.nullcontext() as file:
        for start in range(0, size, BROADCAST_BYTES):
            length = min(BROADCAST_BYTES, size - start)
            block = torch.zeros(length, dtype=torch.uint8)
            if file is not None:
                content = bytearray(file.read(length))
                block[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
            block = block.to(nodes.device)
            dist.broadcast(block, source)
            yield block.cpu().numpy().tobytes()


def _write_blocks(blocks: Iterator[bytes], path: Path) -> None:
    with path.open("wb") as file:
        file.writelines(blocks)
