"""The folder of a local run: its stages, and the process that trains it.

``local-runs/NAME`` has a folder for each stage that was started, ``local-runs/NAME/STAGE``. Every
command that takes a run or a job takes either path.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import PreflightError
from sm_train.toolkit.records.checkpoints import local_checkpoints
from sm_train.toolkit.records.job_logs import LOG_NAME, read_events
from sm_train.toolkit.records.live_state import LiveState, fold_events

LOCK_NAME = ".lock"
"""File in a local run's folder that is locked while it trains, with the process to interrupt."""

COMMAND_NAME = ".command"
"""File in a local run's folder with the command that started it."""

FINISHED_NAME = ".finished"
"""File in a stage's folder with its last step, written when the stage is done and removed when it
starts again. Checkpoints alone do not show it: they are copied file by file."""

DEFAULT_FOLDER = Path("local-runs")

_RUN_FILE = Path("bundle") / "run.json"


@dataclass(frozen=True)
class LocalRunFolder:
    """A local run's folder; ``stage`` is set if the user named one stage."""

    path: Path
    stage: str | None = None

    @property
    def stages(self) -> list[Path]:
        """The folders of the stages that were started and that the user means, oldest first."""
        if self.stage is not None:
            return [self.path / self.stage]
        found = [log.parent for log in self.path.glob(f"*/{LOG_NAME}")]
        return sorted(found, key=lambda folder: (folder / LOG_NAME).stat().st_mtime)

    @property
    def target(self) -> Path:
        """The path that the user means."""
        return self.path if self.stage is None else self.path / self.stage

    @property
    def start_command(self) -> str:
        """The command that started the run; it also resumes it."""
        path = self.path / COMMAND_NAME
        if not path.exists():
            return "sm-train submit RUN --local"
        return path.read_text(encoding="utf-8", errors="replace").strip()

    def config(self) -> RunConfig:
        """Return the run file of the newest stage, as its processes read it.

        Raises:
            PreflightError: the folder has none.
        """
        path = self.stages[-1] / _RUN_FILE
        try:
            return RunConfig.model_validate(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError):
            raise PreflightError(
                f"{self.target}: {path} is missing or damaged; start the run again with "
                "`sm-train submit RUN --local`"
            ) from None

    def is_training(self) -> bool:
        """Return whether a process holds the run's lock."""
        try:
            with (self.path / LOCK_NAME).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def interrupt(self) -> None:
        """Make the run's process save a checkpoint and end, as Ctrl-C does.

        Raises:
            PreflightError: its process is on another machine, or does not handle signals.
        """
        try:
            owner = (self.path / LOCK_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            owner = ""
        host, _, number = owner.strip().rpartition(" ")
        if not self.is_training():  # after the file was read: the process is its owner
            return
        if not number.isdigit():
            raise PreflightError(
                f"{self.path}: a thread of another program trains it; interrupt that program"
            )
        if host != socket.gethostname():
            raise PreflightError(f"{self.path}: trains on {host}; stop it there")
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGTERM)


def lock_owner(process: int) -> str:
    """Return the line in the lock file that names the process to interrupt."""
    return f"{socket.gethostname()} {process}\n"


def find_local_run(target: str | Path) -> LocalRunFolder | None:
    """Return the local run at the path ``target``, also relative to ``local-runs``.

    None if there is none: the name of a run or job on SageMaker is not a path.
    """
    path = Path(target) if Path(target).name else Path(target).absolute()
    candidates = [path, DEFAULT_FOLDER / path] if len(path.parts) == 2 else [path]
    for candidate in candidates:
        if (candidate / LOG_NAME).is_file() and (candidate / "bundle").is_dir():
            return LocalRunFolder(candidate.parent, candidate.name)
        logs = candidate.glob(f"*/{LOG_NAME}") if candidate.is_dir() else ()
        if any((log.parent / "bundle").is_dir() for log in logs):
            return LocalRunFolder(candidate)
    return None


def newest_checkpoints(run: LocalRunFolder) -> Path:
    """Return the folder of checkpoints of the run's newest stage that has a checkpoint or a model.

    Raises:
        PreflightError: no stage has one yet.
    """
    for stage in reversed(run.stages):
        stored = local_checkpoints(stage / "checkpoints")
        if stored.name is not None or stored.final:
            return stage / "checkpoints"
    raise PreflightError(
        f"{run.target}: has no complete checkpoint yet; the first is written after "
        "checkpoint.every_steps steps, or at Ctrl-C"
    )


def final_model(stage: Path) -> Path | None:
    """Return the folder of a stage's final model; None if it has none."""
    for folder in (stage / "nodes" / "algo-1" / "model", stage / "checkpoints" / FINAL_MODEL):
        if folder.is_dir() and any(folder.iterdir()):
            return folder
    return None


def finished_step(stage: Path, max_steps: int) -> int | None:
    """Return the step at which a stage of ``max_steps`` finished; None if it has steps left."""
    try:
        step = int((stage / FINISHED_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return step if step >= max_steps else None


def read_live(stage: Path) -> LiveState:
    """Return the newest events in a stage's log."""
    if not (stage / LOG_NAME).exists():
        return LiveState()
    return fold_events((f"algo-{event['node'] + 1}", event) for event in read_events(stage))


def has_failure_file(folder: Path) -> bool:
    """Return whether a node of a stage wrote why it failed."""
    return any(path.stat().st_size for path in folder.glob("nodes/*/output/failure"))
