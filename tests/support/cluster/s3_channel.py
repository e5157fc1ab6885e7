"""Which objects SageMaker puts into an input channel, and under which path."""

from __future__ import annotations

from collections.abc import Iterable


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
