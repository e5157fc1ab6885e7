"""A real Slurm cluster: a controller and two nodes on this computer.

Each ``slurmd`` runs in a mount namespace of its own, with its own local disk and the cluster's host
names, so that the nodes share only what a shared file system would. GPUs are devices that nothing
opens. Memory is a resource, as on most clusters. Needs root and Debian's packages slurm-wlm,
libslurm-dev and munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.capabilities import skip_or_fail
from tests.support.cluster.training_jobs import free_port
from tests.support.deadline import DEADLINE

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "cc")
PYXIS = Path(__file__).parents[1] / "pyxis" / "pyxis.c"
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
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
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

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job."""
        words = self.run(f"scontrol show job --oneliner {number}").split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for_job(self, number: str, **fields: str) -> None:
        """Wait until a job has these fields."""
        self.wait_for(f"job {number} {fields}", lambda: fields.items() <= self.job(number).items())

    def start_soon(self, number: str) -> None:
        """Start a requeued job, which Slurm delays by two minutes.

        Within seconds of its end, nodes refuse it: its credential was revoked (22.05).
        """
        self.wait_for_job(number, JobState="PENDING")
        self.run(f"scontrol update jobid={number} StartTime=now+6")

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


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Run a cluster in a new folder; skip the test where that is not possible."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [] if HEADER.exists() else [str(HEADER)]
    if missing or os.geteuid() != 0:
        skip_or_fail(f"Slurm: needs root and {', '.join(missing)}", "REQUIRE_SLURM")
    cluster = Slurm(folder)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
