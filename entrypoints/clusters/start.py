"""The first process of a pod's container, or of a node's Slurm task.

It turns the platform's variables and mounts into the folders and files of a SageMaker training job,
starts the same launcher as there, and exits with its code. SIGTERM becomes the file that the ranks
look for, as in a training job: torchrun would fail at it, and kill ranks that write a checkpoint.
Slurm sends it to every process of the step, so the launcher is started with SIGTERM blocked.

A stopped job exits with 143, as a process that SIGTERM ended, so that the platform starts it again:
with 0, Kubernetes would take the stage for finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sm_train.entrypoints.base.pip_install import PackageInstallError, install_job_packages
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.base.signals import block_signals
from sm_train.entrypoints.clusters.channels import ChannelError
from sm_train.entrypoints.clusters.checkpoint_restore import newest_stored_step, restore
from sm_train.entrypoints.clusters.checkpoint_sync import (
    FAILED_UPLOAD_SECONDS,
    LAST_UPLOAD_SECONDS,
    CheckpointUploads,
)
from sm_train.entrypoints.clusters.cluster_variables import ClusterError, ClusterPlace, read_cluster
from sm_train.entrypoints.clusters.node_record import NodeRecord, StopRequest
from sm_train.entrypoints.clusters.node_recorder import NodeRecorder, recorded_output
from sm_train.entrypoints.clusters.prefix_copy import PrefixError, PrefixFiles
from sm_train.entrypoints.clusters.prepare import (
    PreparationError,
    create_channels,
    create_folders,
    describe_cluster,
    launch_environment,
)
from sm_train.entrypoints.clusters.single_job import (
    has_lost_its_save,
    stop_of_queued_job,
    wait_for_other_jobs,
)
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    FINAL_MODEL,
    MARKER,
    CheckpointMarker,
    LastCheckpointError,
    MarkerError,
    checkpoint_folders,
    checkpoint_series,
    newest_listed,
)
from sm_train.entrypoints.job_interface.job_config import JOB_FILE, RUN_FILE
from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    FLAGGED,
    LAUNCHER_VARIABLE,
    NODE_VARIABLE,
    NOT_SAVED,
    STOPPED,
    TORCHRUN,
    UNFIT_CLUSTER,
    NodeDescription,
    job_number,
    machine_name,
)
from sm_train.entrypoints.launcher.start_doctor import UnfitClusterError
from sm_train.entrypoints.records.doctor_results import FOLDER as DOCTOR_FOLDER
from sm_train.entrypoints.records.doctor_results import read_results, timestamp, unfit_nodes
from sm_train.entrypoints.storage.storage import LocalFolder, open_storage, write_file
from sm_train.entrypoints.storage.store import S3Access

_LAUNCHER = "sm_train.entrypoints.launcher.launch"
_BUNDLE = Path(__file__).parents[3]


def main() -> int:
    """Prepare the node, run the launcher, and return the exit code."""
    paths = SageMakerPaths.from_environment()
    stop = _Stop(paths.stop_request)
    description = NodeDescription.from_json(os.environ[NODE_VARIABLE])
    try:
        place = _place(description)
    except ClusterError as error:
        _log(f"error: {error}")
        return 1
    recorder = _recorder(description, place, stop)
    code = 1
    try:
        with recorded_output(recorder.add):
            try:
                code = _run_node(description, paths, place, stop, recorder)
            except Exception:  # its traceback belongs to the log that is stored
                traceback.print_exc()
    except SystemExit:
        code = STOPPED
        raise
    finally:
        recorder.finish(code)
    is_stopped = stop.by_request or paths.stop_request.exists()
    is_done = code == 0 and not is_stopped and (paths.checkpoints / FINAL_MODEL).is_dir()
    if is_done and description.platform == "slurm":
        # The next attempt would use it; this stage has none. Pods take their disks with them.
        shutil.rmtree(paths.base, ignore_errors=True)
    return code


def _run_node(
    description: NodeDescription,
    paths: SageMakerPaths,
    place: ClusterPlace,
    stop: _Stop,
    recorder: NodeRecorder,
) -> int:
    """Prepare the node, run the launcher, and return the exit code."""
    started, since = time.monotonic(), timestamp()
    try:
        _log(
            f"node {place.node_rank} of {len(place.hosts)} ({place.current_host}; {place.source}), "
            f"first node {place.master_addr}:{place.master_port}"
        )
        if not _has_its_turn(description, recorder.record, stop):
            return NOT_SAVED
        create_folders(description, paths)
        if stop.by_request:
            return 0
        install_job_packages(_BUNDLE)
        lines = create_channels(description, paths, place, sharded=False)
        if description.launcher == TORCHRUN:
            lines += create_channels(description, paths, place, sharded=True)
            describe_cluster(description, paths, place)
        for line in lines:
            _log(line)
        with _checkpoints(description, paths) as copies:
            _require_own_checkpoints(description, paths)
            _log(f"prepared in {time.monotonic() - started:.0f} s: {_checkpoint_line(description)}")
            step = _stored_step(description, paths)
            recorder.set_state("training")
            code = _run_launcher(description, place, stop)
            copies.has_failed = code != 0
    except (
        PackageInstallError,
        PreparationError,
        ChannelError,
        PrefixError,
    ) as error:
        _log(f"error: {error}")
        return 1
    # After a failure, files of other nodes may be missing for that reason.
    if (code == 0 and copies.unstored) or _failed_with(LastCheckpointError.__name__, paths):
        _log(
            "error: the last checkpoint is not stored; the reason is above. Nothing starts this "
            "job again: cure that first"
        )
        return NOT_SAVED
    if code == 0 and stop.by_request:
        # With 0 the platform does not start the job again.
        _log("stopped as requested; the platform's command to resume continues at the checkpoint")
        return 0
    if code == 0 and paths.stop_request.exists():
        _log("stopped before the last step; the same command resumes from the checkpoint")
        return STOPPED
    if code and place.node_rank == 0:
        _keep_flagged_nodes(description, paths, since)
    if code:
        newest = _stored_step(description, paths)
        if newest is not None and newest > (step or 0):
            _log(f"failed with progress: the checkpoint of step {newest} is stored")
            return FAILED_AFTER_PROGRESS
        if _failed_with(UnfitClusterError.__name__, paths):
            return UNFIT_CLUSTER
    return code


def _keep_flagged_nodes(description: NodeDescription, paths: SageMakerPaths, since: str) -> None:
    """Keep the names of nodes that the doctor of this attempt found unfit, for the next start.

    Slurm's batch script excludes them; elsewhere an administrator can.
    """
    unfit = unfit_nodes(read_results([paths.checkpoints / DOCTOR_FOLDER]), since)
    if not unfit:
        return
    storage, known = open_storage(description.checkpoints, S3Access()), list[str]()
    try:
        with contextlib.suppress(FileNotFoundError):
            known = storage.read(FLAGGED).decode().splitlines()
        names = sorted({*known, *unfit})
        write_file(storage, FLAGGED, "".join(f"{name}\n" for name in names).encode())
    except OSError as error:
        _warn(f"the nodes that the doctor found unfit are not stored: {error}")
        return
    _log(f"the doctor found {', '.join(unfit)} unfit: see {storage.address(FLAGGED)}")


def _failed_with(error: str, paths: SageMakerPaths) -> bool:
    """Return whether the training failed with an error of this class."""
    with contextlib.suppress(OSError):
        return error in paths.failure.read_text(errors="replace").partition("\n")[0]
    return False


def _has_its_turn(description: NodeDescription, record: NodeRecord, stop: _Stop) -> bool:
    """Wait until no other job trains the stage, unless this one was stopped in the queue.

    Training does not depend on records: without them there is a warning. Returns False if this job
    has lost its last checkpoint before, and was started again all the same.

    Raises:
        PreparationError: another job trains the stage.
    """
    if record.job_id is None:
        return True
    storage = open_storage(description.checkpoints, S3Access())
    try:
        # In its first start, records of its number are of another cluster with the same folder.
        if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and "SLURM_JOB_ID" in os.environ:
            wait_for_other_jobs(storage, record, _log)
        elif request := stop_of_queued_job(storage, record):
            stop.on_request(request)
        elif has_lost_its_save(storage, record):
            _log(
                "error: this job could not store its last checkpoint before; cure that, then start "
                "another job"
            )
            return False
        else:
            wait_for_other_jobs(storage, record, _log)
    except OSError as error:
        _warn(f"whether another job trains this stage is unknown: {error}")
    return True


class _Stop:
    """Handles SIGTERM: while the node is prepared it exits, later it asks the ranks to stop.

    ``by_request`` is whether a stored request has asked for the stop, of which SIGTERM is none.
    """

    def __init__(self, request: Path) -> None:
        self._request = request
        self.training = self.by_request = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_request(self, request: StopRequest) -> None:
        """Ask the ranks to stop, as ``request`` in the storage demands."""
        if self.by_request:
            return
        self.by_request = True
        _log(f"{request.by} asks for a stop")
        self._request.parent.mkdir(parents=True, exist_ok=True)
        self._request.touch()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.training:
            sys.exit(STOPPED)
        self._request.touch()


def _recorder(description: NodeDescription, place: ClusterPlace, stop: _Stop) -> NodeRecorder:
    """Start to store the node's heartbeat and output next to the stage's checkpoints."""
    host = socket.gethostname()
    now = time.time()
    record = NodeRecord(
        run=json.loads((_BUNDLE / JOB_FILE).read_bytes())[description.stage]["run"],
        stage=description.stage,
        platform=description.platform,
        node=f"algo-{place.node_rank + 1}" if description.launcher == TORCHRUN else host,
        nodes=len(place.hosts),
        instance_type=description.instance_type,
        host=host,
        machine=machine_name(),
        started=now,
        seen=now,
        commands=description.commands,
        job_id=job_number(),
    )
    storage = open_storage(description.checkpoints, S3Access())
    recorder = NodeRecorder(storage, record, on_stop=stop.on_request, warn=_warn)
    run_file = _BUNDLE / RUN_FILE if place.node_rank == 0 else None
    recorder.start(None if run_file is None else run_file.read_bytes())
    return recorder


def _place(description: NodeDescription) -> ClusterPlace:
    """Return the node's place; HyperPod's operator assigns ranks only to the agent's workers."""
    if description.launcher == TORCHRUN:
        return read_cluster(os.environ, description.nodes)
    nodes = int(os.environ.get("NNODES") or description.nodes)
    hosts = tuple(f"node-{number}" for number in range(nodes))
    return ClusterPlace(0, hosts, "assigned by the operator", 0, "NNODES")


@dataclass
class _NodeCopies:
    """What became of a node's checkpoints: those of a failed launcher may never be complete."""

    has_failed: bool = False
    unstored: tuple[str, ...] = ()


@contextlib.contextmanager
def _checkpoints(description: NodeDescription, paths: SageMakerPaths) -> Iterator[_NodeCopies]:
    """Restore the node's checkpoint folder, and upload from it until the launcher has ended."""
    copies = _NodeCopies()
    if not description.syncs_checkpoints:
        yield copies
        return
    store = PrefixFiles(f"{description.checkpoints.rstrip('/')}/")
    restored = restore(store, paths.checkpoints, _warn)
    names = ", ".join(restored.checkpoints) or "no checkpoint"
    others = f"; {restored.others} others stay there" if restored.others else ""
    _log(
        f"restored {names} from {store.uri}: {restored.files} files, {restored.bytes / 1e9:.1f} GB"
        f"{others}"
    )
    uploads = CheckpointUploads(store, paths.checkpoints, _warn)
    uploads.start()
    try:
        yield copies
    finally:
        # Other nodes have failed, too, and every second of the wait delays the next attempt.
        wait = FAILED_UPLOAD_SECONDS if copies.has_failed else LAST_UPLOAD_SECONDS
        copies.unstored = tuple(uploads.finish(wait))


def _require_own_checkpoints(description: NodeDescription, paths: SageMakerPaths) -> None:
    """Refuse to continue from a checkpoint that a job on another platform wrote.

    That job may still run: two jobs would write to the same checkpoints.

    Raises:
        PreparationError: the newest checkpoint is of another platform.
    """
    if description.take_over:
        return
    names = LocalFolder(paths.checkpoints).list_sizes("")
    for series in checkpoint_series(checkpoint_folders(names)):
        for name in series:
            try:
                marker = CheckpointMarker.parse((paths.checkpoints / name / MARKER).read_bytes())
            except (OSError, MarkerError):
                continue  # the training refuses it with its reason
            if marker.platform not in (None, description.platform):
                raise PreparationError(
                    f"{name} was written by a job on {marker.platform}; if that has ended, "
                    "write the manifest with --take-over, else give the run another name"
                )
            break


def _stored_step(description: NodeDescription, paths: SageMakerPaths) -> int | None:
    """Return the step of the newest complete checkpoint in storage; None if it is not known."""
    if description.syncs_checkpoints:
        try:
            return newest_stored_step(PrefixFiles(f"{description.checkpoints.rstrip('/')}/"))
        except Exception as error:  # whatever the store's client raises: the attempt counts
            _warn(f"{description.checkpoints}: {type(error).__name__}: {error}")
            return None
    folder = LocalFolder(paths.checkpoints)
    return newest_listed(folder.list_sizes(""), lambda name: folder.read(f"{name}/{MARKER}")).step


def _checkpoint_line(description: NodeDescription) -> str:
    if description.syncs_checkpoints:
        return f"checkpoints are copied to {description.checkpoints}, the marker last"
    return f"checkpoints are in the shared folder {description.checkpoints}"


def _run_launcher(description: NodeDescription, place: ClusterPlace, stop: _Stop) -> int:
    """Run the launcher to its end; process 1 also reaps what others leave."""
    environment = {
        **os.environ,
        **launch_environment(description, place),
        LAUNCHER_VARIABLE: description.launcher,
    }
    stop.training = True
    command = [sys.executable, "-m", _LAUNCHER, description.entry]
    with block_signals(signal.SIGTERM):
        process = subprocess.Popen(command, cwd=_BUNDLE, env=environment)
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)


def _warn(text: str) -> None:
    _log(f"warning: {text}")


def _log(text: str) -> None:
    print(f"sm-train start: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
