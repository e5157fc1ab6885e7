"""Entry point of a SageMaker Processing job that makes columns: this node's part of the images."""

from __future__ import annotations

from pathlib import Path

from sm_train.entrypoints.base.pip_install import install_user_packages
from sm_train.entrypoints.data_prep.enrichment.build_enrichment import EnrichmentWork
from sm_train.entrypoints.data_prep.enrichment.column_maker import ColumnMaker
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import read_enrichment
from sm_train.entrypoints.data_prep.work.processing_node import run_node
from sm_train.entrypoints.storage.storage import Storage
from sm_train.entrypoints.storage.store import S3Access


def _read_work(destination: Storage, model: Path | None) -> EnrichmentWork:
    plan = read_enrichment(destination, S3Access())
    folder = None if model is None else str(model)
    # The user's code lies next to sm_train, in the folder that the job starts in.
    maker = ColumnMaker(code=None, model=folder, **plan.function)
    return EnrichmentWork(plan, maker)


def main(arguments: list[str] | None = None) -> None:
    """Make this node's columns; the last node to finish writes the result."""
    install_user_packages()
    run_node(_read_work, arguments)


if __name__ == "__main__":
    main()
