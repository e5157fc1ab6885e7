"""Runs a stage on this machine, with progress, until it is done, failed or stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from sm_train.entrypoints.base.signals import record_interrupt
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.records.job_logs import Event, parse_event
from sm_train.toolkit.records.local_folder import LOCK_NAME, lock_owner
from sm_train.toolkit.submit.local.container_folders import lay_out_for_containers
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import CheckpointSync
from sm_train.toolkit.submit.local.folders import LocalFolders, lay_out
from sm_train.toolkit.submit.local.processes import LocalProcesses, NodeFailure
from sm_train.toolkit.terminal.console import messages_are_hidden, stderr_console
from sm_train.toolkit.terminal.interrupts import delayed_interrupts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _RunningStage(Protocol):
    """A running stage, as processes or containers; leaving the context ends all of it."""

    def __enter__(self) -> _RunningStage: ...
    def __exit__(self, *_: object) -> None: ...
    def lines(self) -> Iterator[str]: ...
    def remaining_lines(self) -> Iterator[str]: ...
    def failure(self) -> NodeFailure | None: ...
    def end(self) -> None: ...


def default_nodes(stage: StageSection) -> int:
    """Return the stage's number of instances, limited to this machine's number of cores."""
    return min(stage.instances, os.cpu_count() or 1)


def run_stage(
    config: RunConfig,
    stage: StageSection,
    bundle: Bundle,
    *,
    base: Path,
    nodes: int,
    processes: int,
    output: Path,
    console: Console,
    image: str | None = None,
    options: tuple[str, ...] = (),
) -> LocalFolders:
    """Train one stage on this machine, in containers of ``image`` if it is set.

    The caller holds :func:`exclusive_run`. ``options`` are arguments of the entry script, for
    processes only. Return the stage's folders.

    Raises:
        UserError: it cannot start (exit 2 or 3) or a process failed (exit 6).
        KeyboardInterrupt: Ctrl-C; every process has checkpointed if possible, and exited.
    """
    with contextlib.ExitStack() as stack:
        folders, start = _prepare(
            config, stage, bundle, base, nodes, processes, output, image, options
        )
        stack.enter_context(_synced_checkpoints(folders))
        # An interrupt between the start of a process and the context would leave the process.
        with delayed_interrupts(*_ENDING_SIGNALS):
            running = stack.enter_context(start())
        try:
            # A doctor's run takes no step, so it has no bar.
            _follow(running, folders, stage, console, with_bar=not options)
        except KeyboardInterrupt:
            console.print("Stopping: each process writes a checkpoint and exits …")
            running.end()
            with folders.log.open("a", encoding="utf-8") as log:
                log.writelines(running.remaining_lines())
            raise
        failure = running.failure()
    if failure is not None:
        raise UserError(_describe_failure(failure, folders), ExitCode.JOB_FAILED)
    return folders


def _prepare(
    config: RunConfig,
    stage: StageSection,
    bundle: Bundle,
    base: Path,
    nodes: int,
    processes: int,
    output: Path,
    image: str | None,
    options: tuple[str, ...],
) -> tuple[LocalFolders, Callable[[], _RunningStage]]:
    """Create the stage's folders; return them and the function that starts the stage."""
    if image is None:
        cpu = _without_gpu()
        folders = lay_out(config, stage, bundle, base=base, nodes=nodes, output=output)
        return folders, lambda: LocalProcesses(
            folders, stage, processes=processes, cpu=cpu, options=options
        )
    from sm_train.toolkit.submit.local.containers import LocalContainers

    container_folders = lay_out_for_containers(
        config, stage, bundle, base=base, nodes=nodes, output=output
    )
    return container_folders.local, lambda: LocalContainers(
        container_folders, config, stage, bundle, image=image, processes=processes
    )


@contextlib.contextmanager
def exclusive_run(output: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, and raise KeyboardInterrupt on signals.

    Take it before anything is created: another run's folders would be replaced under its
    processes. The kernel releases the lock however this process ends.

    Raises:
        UserError: another local run holds it.
    """
    output.mkdir(parents=True, exist_ok=True)
    with _interruptible(), _locked(output):
        yield


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    # The lock is truncated: one that is a link must not lead to a file of the user.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with os.fdopen(os.open(output / LOCK_NAME, flags, 0o666), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{output}: another local run is using this folder; wait for it, or pass "
                "--output FOLDER"
            ) from None
        lock.truncate(0)
        # Only the main thread turns a signal into a checkpoint: see _interruptible.
        if threading.current_thread() is threading.main_thread():
            lock.write(lock_owner(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


@contextlib.contextmanager
def _synced_checkpoints(folders: LocalFolders) -> Iterator[None]:
    """Give each node its own copy of the checkpoints, and collect what the nodes write."""
    sync = CheckpointSync(folders.checkpoints, folders.node_checkpoints)
    sync.start()
    try:
        yield
    finally:
        sync.finish()
    if sync.error is not None:
        raise UserError(f"{folders.checkpoints}: checkpoints are missing: {sync.error}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on every signal that ends this process, until the context ends.

    A closed terminal (SIGHUP) or a service manager (SIGTERM) must not leave processes running
    either. A shell starts background commands with SIGINT ignored, so set it explicitly. Only the
    main thread can set handlers: elsewhere the caller handles its signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = [(number, signal.signal(number, _interrupt)) for number in _ENDING_SIGNALS]
    try:
        yield
    finally:
        for number, handler in earlier:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    record_interrupt(number)
    raise KeyboardInterrupt


def _without_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _follow(
    running: _RunningStage,
    folders: LocalFolders,
    stage: StageSection,
    console: Console,
    *,
    with_bar: bool,
) -> None:
    with (
        folders.log.open("a", encoding="utf-8") as log,
        _progress(console, stage, with_bar=with_bar) as display,
    ):
        for line in running.lines():
            log.write(line)
            log.flush()
            event = parse_event(line)
            if event is not None:
                display.show(event)


@contextlib.contextmanager
def _progress(
    console: Console, stage: StageSection, *, with_bar: bool
) -> Iterator[_ProgressDisplay]:
    """Show a progress bar on a terminal, else a line for each event."""
    if not console.is_terminal or not with_bar:
        yield _ProgressLines(console, stage)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        yield _ProgressBar(progress, stage)


class _ProgressDisplay:
    """Shows rank 0's progress, and the warnings and errors of all ranks."""

    def show(self, event: Event) -> None:
        if event["kind"] in ("warning", "error"):
            self._warn(f"{event['kind']} (rank {event['rank']}): {event['message']}")
        elif event["kind"] == "doctor":
            self._print(f"doctor ({event['level']}): {event['sentence']}")
        elif event["rank"] == 0:
            if event["kind"] == "start" and event["resumed_from_step"]:
                self._print(f"{event['stage']}: resumed from step {event['resumed_from_step']:,}")
            self._show_progress(event)

    def _warn(self, text: str) -> None:
        """Print ``text`` also with `--quiet`."""
        if messages_are_hidden():
            stderr_console(shows_results=True).print(text, markup=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        raise NotImplementedError

    def _show_progress(self, event: Event) -> None:
        raise NotImplementedError


class _ProgressLines(_ProgressDisplay):
    def __init__(self, console: Console, stage: StageSection) -> None:
        self._console, self._stage = console, stage

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _show_progress(self, event: Event) -> None:
        if event["kind"] == "step":
            remaining = self._stage.max_steps - event["step"]
            speed = event["steps_per_second"]
            eta = f", {remaining / speed:.0f} s left" if speed else ""
            self._print(
                f"{self._stage.name}: step {event['step']}/{self._stage.max_steps}, "
                f"{_format_speed(speed)}, {_format_loss(event['loss'])}{eta}"
            )
        elif event["kind"] == "checkpoint":
            self._print(f"{self._stage.name}: checkpoint at step {event['step']}")


class _ProgressBar(_ProgressDisplay):
    def __init__(self, progress: Progress, stage: StageSection) -> None:
        self._progress = progress
        self._task = progress.add_task(stage.name, total=stage.max_steps, speed="starting", loss="")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def _show_progress(self, event: Event) -> None:
        if event["kind"] == "start":
            self._progress.update(self._task, completed=event["resumed_from_step"], speed="")
        elif event["kind"] == "step":
            self._progress.update(
                self._task,
                completed=event["step"],
                speed=_format_speed(event["steps_per_second"]),
                loss=_format_loss(event["loss"]),
            )


def _format_speed(value: float | None) -> str:
    return "… it/s" if value is None else f"{value:.2f} it/s"


def _format_loss(value: float | None) -> str:
    return "loss not finite" if value is None else f"loss {value:.4f}"


def _describe_failure(failure: NodeFailure, folders: LocalFolders) -> str:
    name = folders.nodes[failure.node].base.name
    lines = [f"{name} failed (exit {failure.exit_code}); its last lines:"]
    lines += [f"  {line}" for line in failure.last_lines]
    if failure.failure:
        lines += [f"failure file {folders.nodes[failure.node].failure}:"]
        lines += [f"  {line}" for line in failure.failure.splitlines()[:5]]
    lines.append(f"full log: {folders.log}")
    return "\n".join(lines)
