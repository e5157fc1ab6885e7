"""Entry point of a SageMaker Processing job that indexes: this node's shards, then the index."""

from __future__ import annotations

from pathlib import Path

from sm_train.entrypoints.data_prep.indexing.build_index import IndexWork
from sm_train.entrypoints.data_prep.indexing.index_plan import read_index_plan
from sm_train.entrypoints.data_prep.work.processing_node import run_node
from sm_train.entrypoints.storage.storage import Storage
from sm_train.entrypoints.storage.store import S3Access


def _read_work(destination: Storage, model: Path | None) -> IndexWork:
    return IndexWork(read_index_plan(destination, S3Access()))


def main(arguments: list[str] | None = None) -> None:
    """Describe this node's shards; the last node to finish writes the index."""
    run_node(_read_work, arguments)


if __name__ == "__main__":
    main()
