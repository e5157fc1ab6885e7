"""What a node of a real Slurm needs, and what it does when its disk is full."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER
from sm_train.entrypoints.job_interface.node_description import NOT_SAVED, STOPPED
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import build_manifest
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.demo.digits import write_digits
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.conftest import Aws, Cli
from tests.support.cluster.demo_runs import demo_document
from tests.support.cluster.slurm_cluster import Slurm, keep_code, slurm_cluster
from tests.support.cluster.slurm_runs import log, records, run_of, script, store, submit
from tests.support.run_documents import stage
from tests.support.run_files import write_run
from tests.support.webhook_server import webhook_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def test_a_node_needs_only_python_for_the_code(
    aws: Aws, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    path = script(slurm, "fetched", "error")
    bundle = bundle_of(run_of(slurm, "fetched"), Path())
    shutil.rmtree(slurm.folder / "shared" / "fetched" / "code")
    key = f"fetched/code/manifest-{bundle.sha256[:16]}/{ARCHIVE_NAME}"
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="ai-bucket")
    s3.put_object(Bucket="ai-bucket", Key=key, Body=b"other code")
    number = submit(slurm, path)
    slurm.wait_for_job(number, JobState="FAILED")
    assert f"sourcedir.tar.gz is not the code of this run: copy s3://ai-bucket/{key} there" in log(
        slurm, "fetched"
    )
    s3.put_object(Bucket="ai-bucket", Key=key, Body=bundle.archive)
    number = submit(slurm, path)
    slurm.wait_for_job(number, JobState="FAILED")
    assert log(slurm, "fetched").count("restart 0 on") == 2
    [kept] = (slurm.folder / "shared" / "fetched" / "code").iterdir()
    assert [file.name for file in kept.iterdir()] == [ARCHIVE_NAME]


def test_slurms_crontab_stops_the_run_at_its_budget(slurm: Slurm) -> None:
    path = script(slurm, "watched", "waits", budget=1.0)
    folder = records(slurm, "watched")
    store(slurm, "watched", "1", state="training", ran=36_000.0)
    watch = f"sbatch --parsable --ntasks=1 --mem=100M --output=watch.log --wrap 'bash {path} watch'"
    watcher = slurm.run(watch)
    slurm.wait_for("its end", lambda: slurm.state(watcher) in ("COMPLETED", "FAILED"))
    printed = (slurm.folder / "watch.log").read_text()
    assert "[critical] watched/256px: the budget is spent" in printed, printed
    assert json.loads((folder / "stop.json").read_text())["job_id"] == "1"


def test_a_full_disk_is_reported_and_ends_the_run_when_it_stops(
    cli: Cli, slurm: Slurm, tmp_path: Path
) -> None:
    """The real training, with the manifest's own script: checkpoints are on a disk that is full."""
    write_digits(tmp_path / "digits")
    assert cli("pack", "digits", "packed", "--shard-size", "240KB").returncode == 0
    with webhook_server() as alerts:
        document = demo_document(1, 100_000)
        document["cluster"]["environment"]["SM_TRAIN_WEBHOOK"] = alerts.address
        # Nothing is installed: the nodes' Python has all packages.
        document["cluster"] |= {"image": "example.com/train:1", "network_isolation": True}
        document["checkpoint"] |= {"every_steps": 5, "keep_last": 2}
        document["slurm"] = {
            **run_of(slurm, "full").slurm.model_dump(exclude_unset=True),
            "shared_folder": str(slurm.small_disk),
            "data": "shared",
            "data_folder": str(tmp_path / "packed"),
            "data_s3": "s3://my-bucket/digits/",
        }
        run = RunConfig.model_validate(document)
        bundle = build_bundle(run, None)
        manifest = build_manifest(
            run, run.stages[0], "slurm", bundle, region="us-east-1", file=None
        )
        folder = slurm.small_disk / run.name
        keep_code(folder, bundle)
        (slurm.folder / f"{manifest.name}.sbatch").write_text(manifest.text)
        number = slurm.run(manifest.commands["start"]).rpartition(" ")[2]
        slurm.wait_for("a checkpoint", lambda: list(folder.glob(f"checkpoints/*/step-*/{MARKER}")))
        ballast = slurm.small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        [alert, *_] = alerts.wait_for(1)
        assert alert["title"] == "checkpoints cannot be written"
        assert alert["level"] == "critical"
    with ballast.open("r+b") as file:  # room for the records, not for a checkpoint
        file.truncate(ballast.stat().st_size - 500_000)
    warning = r"\d+ checkpoints could not be written since that of step \d+: "
    slurm.wait_for("the node's record", lambda: re.search(warning, cli("status", folder).stdout))
    assert cli("stop", folder).returncode == 0
    slurm.wait_for_job(number, JobState="FAILED", Restarts="0", ExitCode=f"{NOT_SAVED}:0")
    watched = cli("watch", folder, "--once")
    assert watched.returncode == ExitCode.JOB_FAILED, watched.stdout + watched.stderr


def test_submit_starts_a_job_that_the_partition_takes_and_stop_takes_it_out_of_the_queue(
    cli: Cli, slurm: Slurm, tmp_path: Path
) -> None:
    section = run_of(slurm, "sent").slurm.model_dump(mode="json", exclude_unset=True)
    section["options"] |= {"partition": "short", "hold": True}
    path = write_run(
        tmp_path,
        name="sent",
        stages=[stage(instances=2)],
        cluster={"instance_type": "ml.g5.xlarge"},
        slurm=section,
    )
    command = ("submit", path, "--to", "slurm", "--yes")
    checked = cli("check", path, "--offline", "--to", "slurm", "--json", env=slurm.environment)
    assert checked.returncode == ExitCode.PREFLIGHT, checked.stderr
    codes = [finding["code"] for finding in json.loads(checked.stdout)["findings"]]
    assert "partition-limits" in codes
    refused = cli(*command, env=slurm.environment)
    assert refused.returncode == ExitCode.PREFLIGHT
    assert "the partition short allows" in refused.stderr
    assert 'slurm.options.time: "5"' in refused.stderr

    limited = ("--set", "slurm.options.time='5'")
    other = ("--set", "slurm.options.partition=shorts")
    unknown = cli(*command, *limited, *other, env=slurm.environment)
    assert "shorts: the cluster has main, short, urgent" in unknown.stderr
    planned = cli("submit", path, "--to", "slurm", "--dry-run", *limited, env=slurm.environment)
    assert planned.returncode == 0, planned.stderr
    assert "Plan for sent on Slurm" in planned.stdout
    assert slurm.run("squeue --noheader --name=sent-256px") == ""
    asked = cli(*command[:-1], *limited, env=slurm.environment, stdin="n\n")
    assert "Start 256px, $" in asked.stderr
    assert asked.returncode != 0
    started = cli(*command, *limited, "--json", env=slurm.environment)
    assert started.returncode == 0, started.stderr
    number = json.loads(started.stdout)["job"]
    assert slurm.job(number)["JobState"] == "PENDING"
    assert list((slurm.folder / "shared" / "sent" / "code").glob(f"*/{ARCHIVE_NAME}"))
    again = cli(*command, *limited, env=slurm.environment)
    assert f"256px: the cluster has {number} PENDING" in again.stderr

    # No node has started, and the commands know the job all the same.
    folder = slurm.folder / "shared" / "sent"
    document = json.loads(cli("status", folder, "--json").stdout)
    assert (document["state"], document["next_command"]) == (
        "waiting",
        "squeue --name=sent-256px",
    )
    waits = cli("stop", path)
    assert "`squeue --name=sent-256px` shows whether it waits" in waits.stderr
    stopped = cli("stop", path, "--cancel", env=slurm.environment)
    assert stopped.returncode == 0, stopped.stderr
    assert "ran scancel --name=sent-256px --state=PENDING" in stopped.stderr
    assert slurm.job(number)["JobState"] == "CANCELLED"
    command_line = "scancel --name=sent-256px --signal=TERM"
    store(slurm, "sent", number, state="ended", exit_code=STOPPED, commands={"stop": command_line})
    # What a node stored is never run: it only selects among commands that are made here.
    evil = "256px; touch /tmp/x #"
    lines = {"stop": f"scancel --name=sent-{evil} --signal=TERM"}
    store(slurm, "sent", "y", stage=evil, state="ended", exit_code=STOPPED, commands=lines)
    refused = cli("stop", folder, "--cancel", env=slurm.environment)
    assert "has no command for the queue of this job" in refused.stderr
    store(slurm, "sent", "x", state="ended", exit_code=STOPPED, commands={"stop": "touch /tmp/x"})
    refused = cli("stop", folder, "--cancel", env=slurm.environment)
    assert "has no command for the queue of this job" in refused.stderr
