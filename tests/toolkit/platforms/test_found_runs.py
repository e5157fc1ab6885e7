"""A run is found where the user named it, and commands act on the job that was named."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.clusters.node_records.cluster_run import ClusterRun
from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.runs.run_state import read_state
from sm_train.toolkit.runs.stop import stop
from sm_train.toolkit.runs.watch.platform_watch import platform_action

from tests.lives.local import Life
from tests.support.cluster.stored_run import StoredRun
from tests.support.run_documents import run, stage

OPTIONS = {"region": "us-east-1", "profile": None}


@pytest.fixture
def stored(tmp_path: Path) -> StoredRun:
    """A run on a cluster with the stages a, which is done, and b, which trains."""
    document = run(stages=[stage("a"), stage("b", resolution=512)])
    document["kubernetes"] = {"image": "registry.example.com/train:1"}
    found = StoredRun(tmp_path / "shared/demo/checkpoints", RunConfig.model_validate(document))
    now = time.time()
    found.attempt(now - 9000, stage="a", states=("ended", "ended"), codes=(0, 0))
    found.attempt(now - 20, stage="b")
    return found


def test_a_stop_of_a_stage_concerns_no_other(stored: StoredRun) -> None:
    result = stop(find_run(str(stored.folder / "a"), OPTIONS), wait=True)
    assert (result.stage, result.status) == ("a", "Completed")
    newest = stop(find_run(str(stored.folder), OPTIONS), wait=False)
    assert (newest.stage, newest.status) == ("b", "Stopping")


def test_attempts_are_in_order_although_a_node_runs_on(stored: StoredRun) -> None:
    """A node that runs on belongs to the newest attempt, which seems to be the oldest."""
    [first, second] = stored.attempt(time.time() - 5000, codes=(1, None), stage="b")
    stored.store(replace(second, seen=time.time() - 10), time.time() - 10)
    stored.attempt(time.time() - 2000, states=("ended",), codes=(1,), stage="b")
    jobs = [job.name for job in find_run(str(stored.folder / "b"), OPTIONS).named_jobs()]
    assert jobs == sorted(jobs)
    assert first.node == "algo-1"


def test_an_address_is_not_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Life(0, tmp_path / "demo").play()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert find_run("demo", OPTIONS).place == "on this machine, in demo"
    with pytest.raises(UserError):
        find_run("s3://ai-bucket/demo/checkpoints", OPTIONS)


def test_the_watch_of_a_run_with_a_live_job_goes_on(stored: StoredRun, tmp_path: Path) -> None:
    """Also if the stage that is not done has none."""
    found = find_run(str(stored.folder), OPTIONS)
    state = read_state(found)
    assert state.current is not None
    action = platform_action(state)
    assert action.message == "demo--b-kubernetes-0001 is InProgress"
    assert isinstance(found, ClusterRun)


def test_a_damaged_run_file_keeps_nobody_from_stopping_a_local_run(tmp_path: Path) -> None:
    Life(0, tmp_path / "demo").play()
    (tmp_path / "demo" / "256px" / "bundle" / "run.json").write_text("{")
    found = find_run(str(tmp_path / "demo"), OPTIONS)
    assert stop(found, wait=False).stage == "256px"
    with pytest.raises(UserError, match="is missing or damaged"):
        read_state(found)
