"""Creates a node's channel folders: links to mounted files, or downloads.

A mount shows every file to every node. Where SageMaker would give each instance its own part
(ShardedByS3Key), a node's folder has links to its part only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from sm_train.entrypoints.clusters.prefix_copy import PrefixFiles
from sm_train.entrypoints.job_interface.node_description import NodeChannel


class ChannelError(RuntimeError):
    """A channel's files are missing; the message is one line."""


def create_channel(channel: NodeChannel, folder: Path, node_rank: int, nodes: int) -> int:
    """Create ``folder`` with the files of ``channel`` for one node; returns their number.

    Raises:
        ChannelError: there are no files.
    """
    if channel.path is not None:
        return _link(channel, Path(channel.path), folder, node_rank, nodes)
    store = PrefixFiles(channel.uri)
    objects = store.objects()
    names = node_share(objects, node_rank, nodes) if channel.sharded else sorted(objects)
    if not names:
        raise ChannelError(_missing(channel, channel.uri, len(objects), nodes))
    # A job that starts again may have another rank, and the objects may be others.
    known = _downloaded(folder)
    kept = {
        name
        for name in names
        if known.get(name) == objects[name].etag and _size(folder / name) == objects[name].bytes
    }
    _remove_others(folder, kept)
    folder.mkdir(parents=True, exist_ok=True)
    # Each file appears whole: those that are there after an interruption are of this note.
    _note(folder).write_text(json.dumps({name: objects[name].etag for name in names}))
    store.download([name for name in names if name not in kept], folder)
    return len(names)


def _note(folder: Path) -> Path:
    """Return the file next to a channel's folder with the ETags of what was downloaded."""
    return folder.with_name(f".{folder.name}.json")


def _downloaded(folder: Path) -> dict[str, str]:
    """Return the ETag of each file that an earlier start downloaded."""
    try:
        found = json.loads(_note(folder).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove files that are not part of the channel any more, or are not known to be current."""
    if folder.is_symlink():
        folder.unlink()
    for path in folder.rglob("*"):
        if not path.is_dir() and path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def node_share(names: Iterable[str], node_rank: int, nodes: int) -> list[str]:
    """Return every ``nodes``-th of the sorted names, starting at ``node_rank``."""
    return sorted(names)[node_rank::nodes]


def _link(channel: NodeChannel, source: Path, folder: Path, node_rank: int, nodes: int) -> int:
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        folder.mkdir()
        (folder / source.name).symlink_to(source)
        return 1
    if not source.is_dir():
        raise ChannelError(f"channel {channel.name}: {source} is not mounted ({channel.uri})")
    if not channel.sharded or nodes == 1:
        folder.symlink_to(source)
        return sum(1 for _ in source.iterdir())
    files = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    names = node_share(files, node_rank, nodes)
    if not names:
        raise ChannelError(_missing(channel, str(source), len(files), nodes))
    for name in names:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source / name)
    return len(names)


def _missing(channel: NodeChannel, source: str, files: int, nodes: int) -> str:
    if not files:
        return f"channel {channel.name}: {source}: no files"
    return f"channel {channel.name}: {source}: {files} files for {nodes} nodes, which need one each"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
