"""Training by the batch script on a real Slurm cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest, build_manifest
from sm_train.toolkit.demo.digits import write_digits
from sm_train.toolkit.records.job_logs import Event, parse_event

from tests.conftest import Cli
from tests.support.cluster.demo_runs import demo_document, latest_step
from tests.support.cluster.slurm_cluster import NODES, Slurm, keep_code, slurm_cluster
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path / "cluster") as cluster:
        yield cluster


def run_file(folder: Path, cluster: Path, nodes: int, max_steps: int) -> RunConfig:
    document = demo_document(nodes, max_steps)
    document["cluster"] |= {
        "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/train:1",
        "network_isolation": True,  # nothing is installed: the nodes' Python has all packages
    }
    document["slurm"] = {
        "shared_folder": str(cluster / "shared"),
        "local_folder": str(cluster / "disk"),
        "container": False,
        "python": sys.executable,
        "options": {"exclusive": False},
        "data": "shared",
        "data_folder": str(folder / "packed"),
        "data_s3": "s3://my-bucket/digits/",
    }
    return RunConfig.model_validate(document)


@pytest.mark.slow
def test_slurm_job_fails_with_a_node_stops_and_resumes_on_one(
    cli: Cli, slurm: Slurm, tmp_path: Path
) -> None:
    write_digits(tmp_path / "digits")
    assert cli("pack", "digits", "packed", "--shard-size", "240KB").returncode == 0
    checkpoints = slurm.folder / "shared" / "digits" / "checkpoints" / "digits"
    manifest = stage(slurm, run_file(tmp_path, slurm.folder, 2, 100_000))

    job = start(slurm, manifest.commands["start"])
    wait_for(slurm, job, "checkpoint", 10)
    text = log(slurm, job)
    # Each node reads its own half of the shards, of which the folder shows all.
    shares = re.findall(
        r"^(\d): sm-train start: channel train: (\d+) files, part (\d) of 2", text, re.M
    )
    shards = len(list((tmp_path / "packed" / "shards").glob("*.tar")))
    assert sorted((node, part) for node, _, part in shares) == [("0", "1"), ("1", "2")]
    assert sum(int(files) for _, files, _ in shares) == shards
    assert "doctor" in {event["kind"].partition("-")[0] for event in events(text)}
    for process in slurm.processes(NODES[1]):
        os.kill(process, signal.SIGKILL)
    # A checkpoint is stored, so the job is queued again; Slurm alone would have ended it.
    slurm.wait_for("a second attempt", lambda: "queued again (progress)" in log(slurm, job))
    file = slurm.folder / "shared" / "digits" / "logs" / f"digits-digits-{job}.log"
    diagnosis = json.loads(cli("diagnose", str(file), "--json").stdout)
    first = diagnosis["evidence"][0]
    assert (diagnosis["cause"], first["node"]) == ("process-killed", NODES[1])
    saved = latest_step(checkpoints)

    slurm.start_soon(job)
    slurm.wait_for("its start", lambda: len(events(log(slurm, job), "start")) == 2)
    _, begin = events(log(slurm, job), "start")
    before = len(events(log(slurm, job), "step"))
    slurm.wait_for("two steps", lambda: len(events(log(slurm, job), "step")) > before + 1)
    assert (begin["nodes"], begin["resumed_from_step"]) == (2, saved)
    slurm.run(manifest.commands["stop"])
    assert slurm.end(job) == "FAILED"  # Exit code 143.
    *_, end = events(log(slurm, job), "end")
    stopped = latest_step(checkpoints)
    assert (end["reason"], end["step"]) == ("sigterm", stopped)

    alone = stage(slurm, run_file(tmp_path, slurm.folder, 1, stopped + 3))
    job = start(slurm, alone.commands["resume"])
    assert slurm.end(job) == "COMPLETED", log(slurm, job)
    steps = [event["step"] for event in events(log(slurm, job), "step")]
    assert steps == [stopped + 1, stopped + 2, stopped + 3]
    assert (checkpoints / "final" / "model_index.json").exists()

    # Without a network: from the folder that the nodes share.
    document = json.loads(cli("status", checkpoints.parent, "--json").stdout)
    [stage_status] = document["stages"]
    assert (stage_status["state"], stage_status["step"]) == ("done", stopped + 3)
    ends = [job["status"] for job in stage_status["jobs"]]
    assert ends == ["Failed", "Stopped", "Completed"]
    [reviewed] = json.loads(cli("review", checkpoints.parent, "--json").stdout)["jobs"][-1:]
    assert reviewed["last_step"] == stopped + 3


@pytest.mark.slow
def test_slurm_job_in_an_image_is_requeued_and_resumes(
    cli: Cli, slurm: Slurm, tmp_path: Path
) -> None:
    """Slurm's own srun parses Pyxis's options, which a plugin registers; it has no container."""
    write_digits(tmp_path / "digits")
    assert cli("pack", "digits", "packed", "--shard-size", "240KB").returncode == 0
    document = run_file(tmp_path, slurm.folder, 2, 100_000).model_dump(exclude_unset=True)
    document["slurm"] |= {"container": True, "image": "/fsx/images/train.sqsh"}
    manifest = stage(slurm, RunConfig.model_validate(document))
    job = start(slurm, manifest.commands["start"])
    wait_for(slurm, job, "checkpoint", 10)
    details = slurm.run(f"scontrol show job {job}")
    # Each node grants all of its memory.
    assert "mem=2000M" in details
    options = (slurm.folder / "pyxis.options").read_text().splitlines()
    assert options[0] == "container-image=/fsx/images/train.sqsh"
    assert options[1].startswith(f"container-mounts={slurm.folder / 'shared'}:")
    saved = latest_step(slurm.folder / "shared" / "digits" / "checkpoints" / "digits")
    slurm.run(f"scontrol requeue {job}")
    slurm.wait_for("a second start", lambda: len(events(log(slurm, job), "start")) == 2)
    _, again = events(log(slurm, job), "start")
    assert (again["nodes"], again["resumed_from_step"] >= saved) == (2, True)
    slurm.run(manifest.commands["stop"])
    slurm.end(job)


def stage(slurm: Slurm, config: RunConfig) -> Manifest:
    """Write the batch script, and the bundle to the folder that all nodes share."""
    bundle = build_bundle(config, None)
    manifest = build_manifest(
        config, config.stages[0], "slurm", bundle, region="us-east-1", file=None
    )
    keep_code(slurm.folder / "shared" / config.name, bundle)
    (slurm.folder / f"{manifest.name}.sbatch").write_text(manifest.text)
    return manifest


def start(slurm: Slurm, command: str) -> str:
    """Run the manifest's command, and return the job's id."""
    return slurm.run(command).rpartition(" ")[2]


def log(slurm: Slurm, job: str) -> str:
    file = slurm.folder / "shared" / "digits" / "logs" / f"digits-digits-{job}.log"
    return file.read_text() if file.exists() else ""


def events(text: str, kind: str | None = None) -> list[Event]:
    lines = (re.sub(r"^\d+: ", "", line) for line in text.splitlines())
    found = [event for line in lines if (event := parse_event(line)) is not None]
    return [event for event in found if kind in (None, event["kind"])]


def wait_for(slurm: Slurm, job: str, kind: str, step: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while step not in [event["step"] for event in events(log(slurm, job), kind)]:
        assert slurm.state(job) in ("PENDING", "RUNNING", "COMPLETING"), log(slurm, job)
        assert time.monotonic() < deadline, log(slurm, job)
        time.sleep(0.5)
