"""Emulates a job's input channels: which local files SageMaker would put where on each node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["File", "FastFile"]


@dataclass(frozen=True)
class LocalChannel:
    """An input channel, and the local ``folder`` with the files of its S3 location ``uri``."""

    name: str
    folder: Path
    uri: str
    mode: Mode = "File"
    sharded: bool = False

    @property
    def is_whole_folder(self) -> bool:
        """Return whether each node gets all files of the folder and no others."""
        return self.uri.endswith("/") and not self.sharded

    def node_files(self, node_rank: int, nodes: int) -> dict[str, Path]:
        """Return path in the channel → local file for one of ``nodes`` nodes."""
        root = self.folder.absolute()
        if self.uri.endswith("/"):
            parent, prefix = root.parent, f"{root.name}/"
        elif is_object(self.uri):
            parent, prefix = root, self.uri.rpartition("/")[2]
        else:
            parent, prefix = root.parent, root.name
        found = {path.relative_to(parent).as_posix(): path for path in _candidates(parent, prefix)}
        files = channel_files(found, prefix)
        if self.sharded:
            files = node_share(files, node_rank, nodes)
        return {path: found[key] for path, key in files.items()}

    def configuration(self) -> dict[str, str]:
        """Return the channel's entry in ``inputdataconfig.json``."""
        distribution = "ShardedByS3Key" if self.sharded else "FullyReplicated"
        return {"TrainingInputMode": self.mode, "S3DistributionType": distribution}


def is_object(uri: str) -> bool:
    """Return whether an S3 URI names an object: its last part has a file extension."""
    return "." in uri.rpartition("/")[2]


def _candidates(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield the files of ``parent`` that can start with ``prefix``, without reading the others."""
    first, is_folder, _ = prefix.partition("/")
    for entry in parent.iterdir() if not is_folder else [parent / first]:
        if entry.name.startswith(first):
            inside = entry.rglob("*") if entry.is_dir() else [entry]
            yield from (path for path in inside if path.is_file())


def channel_files(keys: Iterable[str], prefix: str) -> dict[str, str]:
    """Return path in the channel → key of the objects that an ``S3Prefix`` channel holds.

    The prefix is a string: ``shards`` also matches ``shards-old/a.tar``. Such partial matches keep
    their full name (aws/sagemaker-python-sdk issue 3612, read 2026-11). The empty object of a
    folder, which the console creates, is no file.
    """
    folder = prefix.rstrip("/") + "/"
    parent = prefix[: prefix.rfind("/") + 1]
    return {
        key.removeprefix(folder if key.startswith(folder) else parent): key
        for key in sorted(keys)
        if key.startswith(prefix) and not key.endswith("/")
    }


def node_share(files: dict[str, str], node_rank: int, nodes: int) -> dict[str, str]:
    """Return a node's part of a channel that is distributed by ``ShardedByS3Key``."""
    return dict([*files.items()][node_rank::nodes])
