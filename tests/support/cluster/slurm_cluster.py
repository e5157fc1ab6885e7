"""A real Slurm cluster: a controller and three nodes on this computer.

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
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, Bundle

from tests.support.capabilities import skip_or_fail
from tests.support.cluster.training_jobs import free_port
from tests.support.deadline import DEADLINE

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "cc")
PYXIS = Path(__file__).parents[1] / "pyxis" / "pyxis.c"
HEADER = Path("/usr/include/slurm/spank.h")
NODES = ("gpu-0", "gpu-1", "gpu-2")

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
NodeName={nodes[2]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]}
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=5 PriorityTier=1
"""


class Slurm:
    """A Slurm cluster in ``folder``, which all nodes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True)
        ports = tuple(free_port() for _ in range(1 + len(NODES)))
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
        self.small_disk = folder / "small"
        """A file system of 48 MB that all nodes share."""
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)
        self._own_environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYXIS_OPTIONS": str(folder / "pyxis.options"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        self.small_disk.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=48m", "small", self.small_disk], check=True
        )
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = {name: self.folder / f"munge.{name.partition('-')[0]}" for name in names}
        self._daemon(
            "munge", ["munged", "-F", "--force", *(f"--{name}={files[name]}" for name in names)]
        )
        self.wait_for("munged", lambda: files["socket"].exists())
        self._daemon("slurmctld", ["slurmctld", "-D", "-c"])
        for node in NODES:
            self._start_node(node)
        ready = f"idle-{len(NODES)}"
        self.wait_for(
            "nodes", lambda: self.run("sinfo --noheader --partition=main -o %T-%D") == ready
        )

    def _start_node(self, node: str) -> None:
        self._daemon(node, ["unshare", "--mount", "bash", "-c", self._node_command(node)])

    def lose(self, node: str) -> None:
        """Kill all processes of a node, and mark it as down in the controller."""
        daemon = self._daemons.pop(node)
        name = (Path("/proc") / str(daemon.pid) / "ns" / "mnt").readlink()
        daemon.kill()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (folder / "ns" / "mnt").readlink() == name:
                    os.kill(int(folder.name), signal.SIGKILL)
        daemon.wait(DEADLINE)
        self.run(f"scontrol update nodename={node} state=down reason=power")

    def repair(self, node: str) -> None:
        """Start a node again that was lost, and wait until jobs can use it."""
        self._start_node(node)
        self.run(f"scontrol update nodename={node} state=resume")
        query = f"sinfo --noheader --partition=main --nodes={node} -o %T"
        self.wait_for(node, lambda: self.run(query) == "idle")

    def _node_command(self, node: str) -> str:
        """Return what starts a node: with a disk of its own, and the cluster's host names."""
        disk, hosts = self.folder / "disk", self.folder / "hosts"
        disk.mkdir(exist_ok=True)
        return (
            f"mount -t tmpfs disk {disk} && mount --bind {hosts} /etc/hosts && "
            f"exec slurmd -D -N {node}"
        )

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env={**os.environ, **self._own_environment}, stdout=log, stderr=log
            )

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a user's programs find the cluster."""
        return self._own_environment

    def run(self, command: str) -> str:
        """Run a command line as a user of the cluster would, and return its output."""
        result = subprocess.run(
            ["bash", "-c", command],
            # With the stand-in of AWS that the test uses now.
            env={**os.environ, **self._own_environment},
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
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            daemon.wait(DEADLINE)
        subprocess.run(["umount", "--lazy", self.small_disk], check=False)


def keep_code(folder: Path, bundle: Bundle) -> None:
    """Write the code where a node leaves it for the others, in the folder of the run."""
    file = folder / "code" / bundle.sha256[:16] / ARCHIVE_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bundle.archive)


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
