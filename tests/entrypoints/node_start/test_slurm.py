"""The batch script on a real Slurm cluster: a controller and two nodes on this computer.

Each ``slurmd`` runs in a mount namespace of its own, with its own local disk and the cluster's host
names, so that the nodes share only what a shared file system would. GPUs are devices that nothing
opens. Memory is a resource, as on most clusters. Needs root and Debian's packages slurm-wlm,
libslurm-dev and munge.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest, build_manifest
from sm_train.toolkit.demo.digits import write_digits
from sm_train.toolkit.jobs.event_lines import Event, parse_event

from tests.conftest import Cli
from tests.support.capabilities import skip_or_fail
from tests.support.cluster.demo_runs import demo_document, latest_step
from tests.support.cluster.training_jobs import free_port
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "cc")
PYXIS = Path(__file__).parents[2] / "support" / "pyxis" / "pyxis.c"
HEADER = Path("/usr/include/slurm/spank.h")
NODES = ("gpu-0", "gpu-1")

AWS_CLI = """\
#!/bin/sh
# aws s3 cp --only-show-errors s3://BUCKET/KEY FILE
exec cp "{buckets}/${{4#s3://}}" "$5"
"""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=64
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=1 RealMemory=1000 Gres=gpu:1
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES
"""


class Slurm:
    """A Slurm cluster in ``folder``, which all nodes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True)
        ports = (free_port(), free_port(), free_port())
        text = CONFIGURATION.format(
            host=host.stdout.strip(), ports=ports, folder=folder, nodes=NODES
        )
        (folder / "slurm.conf").write_text(text)
        plugin = folder / "pyxis.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", plugin, PYXIS], check=True)
        (folder / "plugstack.conf").write_text(f"required {plugin}\n")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        names = (*NODES, "localhost", host.stdout.strip())
        (folder / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in names))
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)
        (folder / "bin").mkdir()
        (folder / "bin" / "aws").write_text(AWS_CLI.format(buckets=folder / "buckets"))
        (folder / "bin" / "aws").chmod(0o755)
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYXIS_OPTIONS": str(folder / "pyxis.options"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = {name: self.folder / f"munge.{name.partition('-')[0]}" for name in names}
        self._daemon(
            "munge", ["munged", "-F", "--force", *(f"--{name}={files[name]}" for name in names)]
        )
        self.wait_for("munged", lambda: files["socket"].exists())
        self._daemon("slurmctld", ["slurmctld", "-D", "-c"])
        for node in NODES:
            self._daemon(node, ["unshare", "--mount", "bash", "-c", self._node_command(node)])
        self.wait_for("nodes", lambda: self.run("sinfo --noheader -o %T-%D") == "idle-2")

    def _node_command(self, node: str) -> str:
        """Return what starts a node: with a disk of its own, and the cluster's host names."""
        disk, hosts = self.folder / "disk", self.folder / "hosts"
        disk.mkdir(exist_ok=True)
        return (
            f"mount -t tmpfs disk {disk} && mount --bind {hosts} /etc/hosts && "
            f"exec slurmd -D -N {node}"
        )

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
            )

    def run(self, command: str) -> str:
        """Run a command line as a user of the cluster would, and return its output."""
        result = subprocess.run(
            ["bash", "-c", command],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout.strip()

    def state(self, job: str) -> str:
        return re.findall(r"JobState=(\S+)", self.run(f"scontrol show job {job}"))[0]

    def end(self, job: str) -> str:
        """Return the state of a job that has ended."""
        self.wait_for(
            f"job {job}", lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING")
        )
        return self.state(job)

    def processes(self, node: str) -> list[int]:
        """Return the ids of the job's Python processes on ``node``."""
        return [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdecimal()
            and f"SLURMD_NODENAME={node}".encode() in _read(folder / "environ")
            and str(self.folder).encode() in _read(folder / "environ")
            and b"python" in _read(folder / "cmdline")
        ]

    def wait_for(self, what: str, is_done: object) -> None:
        assert callable(is_done)
        deadline = time.monotonic() + DEADLINE
        while not is_done():
            assert time.monotonic() < deadline, f"waited {DEADLINE:.0f} s for {what}"
            time.sleep(0.5)

    def down(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(DEADLINE)


def _read(file: Path) -> bytes:
    """Return the content of a process's file; empty if the process has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [] if HEADER.exists() else [str(HEADER)]
    if missing or os.geteuid() != 0:
        skip_or_fail(f"Slurm: needs root and {', '.join(missing)}", "REQUIRE_SLURM")
    cluster = Slurm(tmp_path / "cluster")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


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
    assert slurm.end(job) == "FAILED"
    file = slurm.folder / "shared" / "digits" / "logs" / f"digits-digits-{job}.log"
    diagnosis = json.loads(cli("diagnose", str(file), "--json").stdout)
    first = diagnosis["evidence"][0]
    assert (diagnosis["cause"], first["node"]) == ("process-killed", NODES[1])
    saved = latest_step(checkpoints)

    job = start(slurm, manifest.commands["resume"])
    wait_for(slurm, job, "step", saved + 2)
    [begin] = events(log(slurm, job), "start")
    assert (begin["nodes"], begin["resumed_from_step"]) == (2, saved)
    slurm.run(manifest.commands["stop"])
    assert slurm.end(job) == "FAILED"  # Exit code 143.
    [end] = events(log(slurm, job), "end")
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
    """Write the batch script, and the bundle to the place that it names."""
    bundle = build_bundle(config, None)
    manifest = build_manifest(
        config, config.stages[0], "slurm", bundle, region="us-east-1", file=None
    )
    file = slurm.folder / "buckets" / manifest.code_uri.removeprefix("s3://")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bundle.archive)
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
        assert slurm.state(job) in ("PENDING", "RUNNING"), log(slurm, job)
        assert time.monotonic() < deadline, log(slurm, job)
        time.sleep(0.5)
