"""One live job of a stage, where the platform numbers its jobs, and stops that hold in a queue."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from sm_train.entrypoints.clusters.node_record import NodeRecord, read_nodes, store_stop_request
from sm_train.entrypoints.clusters.prepare import PreparationError
from sm_train.entrypoints.clusters.single_job import (
    has_lost_its_save,
    stop_of_queued_job,
    wait_for_other_jobs,
)
from sm_train.entrypoints.job_interface.node_description import NOT_SAVED
from sm_train.entrypoints.storage.storage import LocalFolder, write_file

NOW = time.time()


def stored(
    storage: LocalFolder, job_id: str | None, *, ago: float, state: str = "training"
) -> NodeRecord:
    """Store the record of a node that started so long ago and has just sent a heartbeat."""
    record = NodeRecord(
        run="demo",
        stage="256px",
        platform="slurm",
        node="algo-1",
        nodes=1,
        instance_type="own.8xH100",
        host="a",
        machine="gpu-1",
        started=NOW - ago,
        seen=NOW,
        ran=ago,
        job_id=job_id,
    )
    record = replace(record, state=state)  # type: ignore[arg-type]
    write_file(storage, record.file, record.to_json())
    return record


def test_two_jobs_that_start_in_one_second_have_their_own_records(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    records = [stored(storage, job_id, ago=10) for job_id in ("7", "8", None)]
    assert len({record.folder for record in records}) == 3
    assert {node.record.job_id for node in read_nodes(storage)} == {"7", "8", None}


def test_a_second_job_waits_for_the_first_and_is_refused_if_it_trains_on(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    first, second = stored(storage, "7", ago=60), stored(storage, "8", ago=1)
    lines: list[str] = []
    with pytest.raises(PreparationError, match="job 7 trains this stage"):
        wait_for_other_jobs(storage, second, lines.append, limit=0.2, poll=0.05)
    assert lines[0] == "job 7 seems to train this stage: waiting for its end"
    # It does not wait for the second, but once it has started again, it does.
    again = replace(first, started=NOW, ran=0.0)
    write_file(storage, again.file, again.to_json())
    write_file(storage, first.file, replace(first, state="ended", exit_code=143).to_json())
    with pytest.raises(PreparationError, match="job 8 trains this stage"):
        wait_for_other_jobs(storage, again, lines.append, limit=0.0, poll=0.01)
    (tmp_path / again.file).unlink()
    write_file(storage, first.file, first.to_json())
    # The first does not wait for the second.
    wait_for_other_jobs(storage, first, lines.append, limit=0.0)
    write_file(storage, first.file, replace(first, state="ended", exit_code=0).to_json())
    wait_for_other_jobs(storage, second, lines.append, limit=0.0)


@pytest.mark.parametrize("job_id", ["7", None])
def test_a_job_that_starts_again_does_not_wait_for_its_own_lost_nodes(
    tmp_path: Path, job_id: str | None
) -> None:
    storage = LocalFolder(tmp_path)
    stored(storage, job_id, ago=60)
    again = stored(storage, job_id, ago=1)
    wait_for_other_jobs(storage, again, lambda line: pytest.fail(line), limit=0.0)


def test_a_stop_holds_for_a_requeued_job_and_not_for_another_one(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    record = stored(storage, "7", ago=60, state="ended")
    assert stop_of_queued_job(storage, record) is None
    store_stop_request(storage, "sm-train stop", "7")
    requeued = replace(record, started=NOW + 3600)
    request = stop_of_queued_job(storage, requeued)
    assert request is not None
    assert request.applies_to(NOW + 3600, "7")
    assert not request.applies_to(NOW + 3600, "8")
    assert stop_of_queued_job(storage, replace(requeued, job_id="8")) is None
    # Where the platform numbers no jobs, it concerns what has started.
    store_stop_request(storage, "sm-train stop")
    assert stop_of_queued_job(storage, requeued) is None
    assert stop_of_queued_job(storage, replace(requeued, job_id=None)) is None


def test_a_job_that_lost_its_last_checkpoint_is_known_when_it_starts_again(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    first = stored(storage, "7", ago=60, state="ended")
    again = replace(first, started=NOW, ran=0.0)
    assert not has_lost_its_save(storage, again)
    write_file(storage, first.file, replace(first, exit_code=NOT_SAVED).to_json())
    assert has_lost_its_save(storage, again)
    # Another job, after the cure, trains.
    assert not has_lost_its_save(storage, replace(again, job_id="8"))
    assert not has_lost_its_save(storage, replace(again, job_id=None))
