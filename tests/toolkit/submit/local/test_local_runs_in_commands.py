"""Every command that takes a run also takes the folder of a local run."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sm_train
from sm_train.toolkit.records.local_folder import LOCK_NAME, find_local_run
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.conftest import Cli
from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.run_files import one_line
from tests.toolkit.submit.local.local_runs_in_commands_support import train
from tests.toolkit.submit.local.submit_local_support import write_tiny

pytestmark = pytest.mark.integration

RUN = "local-runs/tiny"
TARGETS = [RUN, f"{RUN}/8px", "tiny/8px"]


@pytest.mark.slow
def test_a_local_run_from_its_first_steps_to_a_picture(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=20)
    run = write_tiny(tmp_path, max_steps=100)
    first = train(cli, run, "--steps", "3")
    assert "step 3/3" in first
    assert "1 of 2 nodes, 1 process each" in first
    assert "resumed" not in first
    assert "8px: resumed from step 3\n" in train(cli, run, "--steps", "4")
    done = train(cli, run, "--steps", "4")
    assert done == (
        f"8px: already finished, 4/4 steps; model in {RUN}/8px/nodes/algo-1/model. "
        f"Remove {RUN}/8px to train it again\n"
    )

    for target in TARGETS:
        status = cli("status", target, "--json")
        assert status.returncode == 0, status.stderr
        document = json.loads(status.stdout)
        assert (document["run"], document["region"], document["state"]) == ("tiny", None, "done")
        [stage] = document["stages"]
        assert (stage["step"], stage["max_steps"], stage["checkpoint_step"]) == (4, 4, 4)
        assert document["next_command"].startswith("sm-train sample ")
    assert "8px: model in" in cli("status", RUN).stdout
    logged = cli("logs", RUN).stdout
    assert "step 4/4" in logged
    assert "SMT {" not in logged
    assert 'SMT {"kind": "start"' in cli("logs", "tiny/8px", "--raw").stdout
    refused = cli("logs", RUN, "--node", "2")
    assert one_line(refused.stderr).startswith("sm-train: --node: applies to jobs on SageMaker")
    watched = cli("watch", RUN)
    assert (watched.returncode, "done" in watched.stderr) == (0, True)
    for target in TARGETS:
        cost = cli("cost", run, "--measured", target, "--rescale-batch", "--json")
        assert cost.returncode == 0, cost.stderr
        assert cli("diagnose", target).returncode == 0
        for command in ("cost", "check --offline"):
            result = cli(*command.split()[:1], target, *command.split()[1:], "--json")
            assert result.returncode == 0, result.stderr
        review = cli("review", target, "--json")
        assert review.returncode == 0, review.stderr
    stopped = cli("stop", RUN, "--json")
    assert json.loads(stopped.stdout) == {
        "training_job_name": None,
        "stage": "8px",
        "status": "Completed",
        "warning": None,
    }
    assert stopped.stderr == f"{RUN} has ended\n"
    refused = cli("stop", RUN, "--after-stage")
    assert one_line(refused.stderr).startswith("sm-train: --after-stage: applies to jobs")
    for target in TARGETS[:2]:
        as_python_sees_it(sm_train.Job(str(tmp_path / target)))
    # Offline: AWS is not asked about a folder.
    missing = cli("export", RUN, "model", "--stage", "16px")
    assert one_line(missing.stderr).startswith(
        "sm-train: --stage: '16px' is not in local-runs/tiny"
    )


def as_python_sees_it(job: sm_train.Job) -> None:
    """Check the methods of a job that is a finished local run of 4 steps."""
    status = job.status()
    assert (status.run, status.state, status.stages[0].step) == ("tiny", "done", 4)
    lines = list(job.logs(follow=True))
    [start, *_] = [line for line in lines if line.message.startswith('SMT {"kind": "start"')]
    assert (start.node, type(start.time)) == ("algo-1", float)
    assert any(
        (line.time, line.node) == (None, None) and "step 4/4" in line.message for line in lines
    )
    with pytest.raises(sm_train.UsageError, match="--node: applies to jobs"):
        job.logs(node=1)
    assert (job.wait(), job.stop()) == ("Completed", "Completed")
    assert job.metrics().last is not None
    assert [job_review.name for job_review in job.review().jobs]
    assert job.diagnose().cause == "no-failure"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_sample_and_export_take_a_local_run(cli: Cli, tmp_path: Path, target: str) -> None:
    write_shards(tmp_path / "shards", shards=2, each=20)
    train(cli, write_tiny(tmp_path, max_steps=2))
    (tmp_path / "prompts.txt").write_text("a cat\n")
    sampled = cli("sample", target, "--prompts", "prompts.txt", "--steps", "2")
    assert sampled.returncode == 0, sampled.stderr
    assert (tmp_path / "grid.png").stat().st_size > 0
    exported = cli("export", target, "model")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model" / "model_index.json").exists()


def unfinished(folder: Path) -> Path:
    """Write the folder of a local run that was stopped before its first checkpoint."""
    config = tiny_run(max_steps=9)
    stage = folder / RUN / "8px"
    stage.mkdir(parents=True)
    (stage / "events.log").write_text("starting\n")
    with tarfile.open(fileobj=io.BytesIO(bundle_of(config, folder).archive)) as archive:
        archive.extractall(stage / "bundle", filter="data")
    (folder / RUN / ".command").write_text("sm-train submit run.yaml --local --nodes 1\n")
    return folder / RUN


def fail(run: Path) -> None:
    failure = run / "8px" / "nodes" / "algo-1" / "output" / "failure"
    failure.parent.mkdir(parents=True)
    failure.write_text("RuntimeError: no\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "state", "command"),
    [
        (lambda run: None, "stopped", "sm-train submit run.yaml --local --nodes 1"),
        (fail, "failed", "sm-train diagnose {run}/8px"),
        (lambda run: (run / ".command").unlink(), "stopped", "sm-train submit RUN --local"),
    ],
)
def test_next_command_of_a_local_run_that_ended_early(
    cli: Cli, tmp_path: Path, change: Callable[[Path], None], state: str, command: str
) -> None:
    run = unfinished(tmp_path)
    change(run)
    document = json.loads(cli("status", RUN, "--json").stdout)
    assert (document["state"], document["stage"]) == (state, "8px")
    assert document["next_command"] == command.format(run=RUN)
    watched = cli("watch", RUN)
    assert watched.returncode == (6 if state == "failed" else 0)


def test_locked_run_is_training_and_watch_waits_for_its_end(cli: Cli, tmp_path: Path) -> None:
    run = unfinished(tmp_path)
    with (run / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = sm_train.Job(str(run))
        assert job.status().state == "starting"
        with pytest.raises(sm_train.PreflightError, match="interrupt that program"):
            job.stop()
        lock.write("another-host 1\n")
        lock.flush()
        with pytest.raises(sm_train.PreflightError, match="trains on another-host; stop it there"):
            job.stop()
        once = cli("watch", RUN, "--once", "--json")
        assert json.loads(once.stdout)["next_command"] == f"sm-train watch {RUN}"
    assert json.loads(cli("watch", RUN, "--json").stdout)["state"] == "stopped"


def test_name_of_a_local_run_gets_a_hint(cli: Cli, tmp_path: Path) -> None:
    """A bare name is that of a run on SageMaker."""
    unfinished(tmp_path)
    result = cli("status", "tiny", "--region", "us-east-1")
    assert result.returncode == 4
    assert one_line(result.stderr).endswith(f"; the run on this machine is {RUN}")


def test_folder_without_its_run_file_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = unfinished(tmp_path)
    (run / "8px" / "bundle" / "run.json").write_text("{")
    result = cli("status", RUN)
    assert result.returncode == 3
    assert "is missing or damaged; start the run again" in one_line(result.stderr)
    shutil.rmtree(run / "8px" / "bundle")
    assert find_local_run(run) is None
