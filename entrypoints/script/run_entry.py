"""Runs the user's own training script (``entry``) as if it had been started itself.

The script sees its own arguments and folder. Around it are the doctor, the watchdog and an observer
of Accelerate, so that steps, speed, heartbeats, checkpoints and the stop work without a changed
line.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig
from sm_train.entrypoints.base.signals import unblock_sigterm
from sm_train.entrypoints.distributed.backend import decide, join
from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import CHANNEL, RESUME, placeholders, resolve
from sm_train.entrypoints.launcher.training_process import TrainingProcess, exit_now, run_job
from sm_train.entrypoints.monitoring.heartbeat import Phase, events_file, heartbeat_folder
from sm_train.entrypoints.script import saved_states
from sm_train.entrypoints.script.current_job import ScriptProcess, set_process
from sm_train.entrypoints.script.hooks import observe_accelerate
from sm_train.entrypoints.script.observer import ScriptObserver
from sm_train.entrypoints.script.ranks import (
    ScriptRank,
    ScriptRanks,
    agree_on_states,
    open_messages,
)
from sm_train.entrypoints.script.stop_agreement import TICK_SECONDS

_EXIT_TIMEOUT = 120.0
"""Seconds for threads and exit handlers of the script, such as a tracker's last upload."""

_NO_MODEL = "model.txt"
"""File in the final folder of a script that left no model."""


def main(arguments: list[str] | None = None) -> None:
    """Run the script; exit with 0 when it is done or stopped, else with 1."""
    code = run_job(_run, arguments)
    timer = threading.Timer(_EXIT_TIMEOUT, exit_now, [code])
    timer.daemon = True
    timer.start()
    # What Python does at the end of a script, except for destructors: those of a process group can
    # deadlock (train.py).
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    exit_now(code)


def _run(process: TrainingProcess) -> None:
    config, paths = process.config, process.paths
    resources = ResourceConfig.read(paths)
    info = _placement(resources)
    events = EventLog(
        node=info.node,
        rank=info.rank,
        recent_events_file=events_file(heartbeat_folder(), info.local_rank),
        subscriber=process.trackers.send,
    )
    for folder in (paths.checkpoints, paths.model, paths.output_data):
        folder.mkdir(parents=True, exist_ok=True)
    _join_smddp(process, resources, events)
    messages = open_messages(info)
    states = agree_on_states(_own_states(process, info), info, messages)
    if info.leads_node:
        for name in saved_states.remove_incomplete(paths.checkpoints, states):
            events.warn("checkpoint-incomplete", f"{name} is incomplete and was removed")
        shutil.rmtree(paths.checkpoints / FINAL_MODEL, ignore_errors=True)
    observer = ScriptObserver(
        config, resources, paths.checkpoints, process.heartbeat, events, paths.stop_request
    )
    observer.saves.resumable = any(
        RESUME in placeholders(argument) or argument == "latest" for argument in config.entry_args
    )
    observer.saves.last = states[0] if states else None
    observer.ranks = ScriptRanks(
        paths.checkpoints,
        info,
        messages,
        step=lambda: observer.loop.step,
        steps_per_second=lambda: observer.log.steps_per_second,
        on_complete=observer.saves.log_complete,
    )
    set_process(ScriptProcess(config, paths, resources, info, observer, events))
    observe_accelerate(observer)
    background = _Background(observer, observer.ranks, paths.stop_request)
    background.start()
    _run_script(config.entry or "", resolve(config.entry_args, _values(process, states)))
    try:
        observer.finish()
    except Exception as error:
        observer.failed(error)
    background.end()
    process.heartbeat.enter(Phase.FINISH, observer.loop.step)
    if not observer.ranks.finish(lambda: process.heartbeat.enter(Phase.FINISH, observer.loop.step)):
        events.warn("checkpoint-incomplete", "the last checkpoint is not complete on all ranks")
    if observer.stopped and observer.loop.stop is not None:
        observer.loop.stop.confirm()
    if info.rank == 0:
        if not observer.stopped:
            _share_model(paths.model, paths.checkpoints / FINAL_MODEL, config.entry or "")
        observer.log_end()


def _placement(resources: ResourceConfig) -> ScriptRank:
    environment = os.environ
    return ScriptRank(
        int(environment.get("RANK", "0")),
        int(environment.get("WORLD_SIZE", "1")),
        int(environment.get("LOCAL_RANK", "0")),
        resources.node_rank,
        len(resources.hosts),
    )


def _join_smddp(process: TrainingProcess, resources: ResourceConfig, events: EventLog) -> None:
    """Create the process group of processes that MPI started, with SMDDP if possible.

    Accelerate then uses it. Elsewhere it creates its own.
    """
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return
    choice = decide(
        nodes=len(resources.hosts),
        backend=process.config.backend,
        instance_type=resources.instance_type,
    )
    choice = join(choice, process.end_hanging_job)
    if choice.warning and int(os.environ.get("RANK", "0")) == 0:
        events.warn("smddp-unavailable", choice.warning)


def _own_states(process: TrainingProcess, info: ScriptRank) -> list[saved_states.SavedState]:
    """Return the complete states that this node holds; reading their digests may take minutes."""
    if not info.leads_node:
        return []
    return saved_states.complete_states(process.paths.checkpoints)


def _values(process: TrainingProcess, states: list[saved_states.SavedState]) -> Mapping[str, str]:
    """Return the values of the placeholders in ``entry_args``."""
    config, paths = process.config, process.paths
    stage = config.stage
    values = {
        "stage": stage.name,
        "checkpoints": str(paths.checkpoints),
        "model": str(paths.model),
        "output": str(paths.output_data),
        "resolution": str(stage.resolution),
        "per_device_batch_size": str(stage.per_device_batch_size),
        "gradient_accumulation_steps": str(stage.gradient_accumulation_steps),
        "max_steps": str(stage.max_steps),
        "learning_rate": str(stage.learning_rate),
        "seed": str(config.training.seed),
    }
    for argument in config.entry_args:
        for name in placeholders(argument):
            if name.startswith(CHANNEL):
                values[name] = str(paths.channel(name.removeprefix(CHANNEL)))
    if states:
        values[RESUME] = str(paths.checkpoints / states[0].name)
    return values


def _run_script(entry: str, arguments: list[str]) -> None:
    """Run ``entry`` as Python would; a SystemExit without an error code is a success.

    Raises:
        Exception: what the script raises.
        RuntimeError: the script exited with an error code.
    """
    bundle = Path(sys.argv[0]).resolve().parent
    script = bundle / entry
    sys.argv = [str(script), *arguments]
    # Python puts the script's folder first; the bundle stays in the path for `import sm_train`.
    sys.path[0] = str(script.parent)
    sys.path.append(str(bundle))
    unblock_sigterm()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{entry} exited with {end.code}") from end


def _share_model(model: Path, final: Path, entry: str) -> None:
    """Give the script's model to the next stage, below the checkpoints; the folder always exists.

    Files are linked, not copied, where both folders are on one file system.
    """
    if model.is_dir() and any(model.iterdir()):
        try:
            shutil.copytree(model, final, copy_function=os.link)
        except OSError:
            shutil.copytree(model, final, dirs_exist_ok=True)
        return
    final.mkdir(parents=True, exist_ok=True)
    (final / _NO_MODEL).write_text(f"{entry} left nothing in the model folder.\n")


class _Background:
    """A thread that looks for a stop, keeps the agreement of the ranks, and beats at first."""

    def __init__(self, observer: ScriptObserver, ranks: ScriptRanks, stop_request: Path) -> None:
        self._observer, self._ranks = observer, ranks
        self._stop_request = stop_request
        self._has_signaled = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sm-train", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            try:
                self._tick()
            except Exception as error:
                self._observer.failed(error)

    def _tick(self) -> None:
        self._observer.loop.beat()
        self._look_for_stop()
        self._ranks.tick()

    def _look_for_stop(self) -> None:
        """Stop after a step; a script without steps, or with its own handler, gets SIGTERM."""
        stop = self._observer.loop.stop
        if stop is not None:
            if stop.requested and self._observer.loop.step > self._observer.loop.first_step:
                self._ranks.stop.request()
        elif self._stop_request.exists() and not self._has_signaled:
            self._has_signaled = True
            os.kill(os.getpid(), signal.SIGTERM)
