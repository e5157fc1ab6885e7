"""Entry point of a SageMaker Processing job that packs: this node's shards, then the index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.data_prep.packing.build_pack import build_shards, finalize, remove_state
from sm_train.entrypoints.data_prep.packing.stored_plan import PackPlan, read_plan
from sm_train.entrypoints.data_prep.work.processing_node import run_node
from sm_train.entrypoints.data_prep.work.work_stages import SharedWork
from sm_train.entrypoints.data_prep.work.worker_pool import WorkerPlan, WorkProgress
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME
from sm_train.entrypoints.storage.storage import Storage
from sm_train.entrypoints.storage.store import S3Access


@dataclass(frozen=True)
class PackWork:
    """A pack as the work of several nodes."""

    pack: PackPlan
    destination: Storage

    @property
    def parts(self) -> str:
        """The number of shards."""
        return f"{len(self.pack.plans)} shards"

    def build(
        self, work: WorkerPlan, shared: SharedWork, on_progress: Callable[[WorkProgress], None]
    ) -> None:
        """Build all shards, together with the other nodes."""
        build_shards(self.pack, work, shared, on_progress)

    def finalize(self) -> str | None:
        """Write the index."""
        totals = finalize(self.pack, self.destination)
        if totals is None:
            return None
        address, rejected = self.destination.address(INDEX_NAME), totals.rejected.total()
        return f"{address}: {totals.samples:,} samples, {rejected:,} rejected"

    def remove_state(self) -> None:
        """Remove what the pack is resumed from."""
        remove_state(self.pack, self.destination)


def _read_work(destination: Storage, model: Path | None) -> PackWork:
    pack = read_plan(destination, S3Access())
    return PackWork(pack if model is None else pack.with_model(model), destination)


def main(arguments: list[str] | None = None) -> None:
    """Build this node's shards; the last node to finish writes the index."""
    run_node(_read_work, arguments)


if __name__ == "__main__":
    main()
