"""The states that a script saves with Accelerate, below the job's checkpoint folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.checkpoint_layout import CheckpointMarker
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.script.accelerate_loop import loaded_folder, saved_folder
from sm_train.entrypoints.script.ranks import Save, ScriptRanks
from sm_train.entrypoints.script.saved_states import SavedState, name_for_step, saved_step

_DEFAULT_NAME = "checkpoint-{step}"
"""Name of a checkpoint in the diffusers examples."""


class ScriptSaves:
    """Takes note of one rank's saves; ``entry`` is the script, ``root`` the checkpoint folder.

    A save is open from :meth:`begin` to :meth:`end`; the ranks mark its folder complete later, from
    another thread. ``last`` is the newest state, and ``resumable`` whether the script takes a
    checkpoint to resume from.
    """

    def __init__(self, entry: str, root: Path, events: EventLog, *, is_main: bool) -> None:
        self._entry, self._root = entry, root
        self._events, self._is_main = events, is_main
        self.last: SavedState | None = None
        self.resumable = False
        self._open: str | None = None
        self._started = 0.0
        self._warned_elsewhere = False

    def begin(
        self, accelerator: Any, output_dir: Any, step: int, ranks: ScriptRanks | None
    ) -> None:
        """Begin to save; a folder below the checkpoints is incomplete from now on."""
        self._open = self._name_of(accelerator, output_dir)
        self._started = time.monotonic()
        if self._open is not None and ranks is not None:
            ranks.begin_save(self._open, step)

    def end(self, *, saved: bool, step: int, ranks: ScriptRanks | None) -> float:
        """End a save, which failed unless ``saved``; return its seconds."""
        seconds = time.monotonic() - self._started
        if self._open is not None and ranks is not None:
            ranks.end_save(seconds=seconds if saved else None)
            if saved:
                self.last = SavedState(self._open, step)
        self._open = None
        return seconds

    def loaded(self, accelerator: Any, input_dir: Any) -> int | None:
        """Return the step of the state that the script has loaded; None if it has none."""
        folder = loaded_folder(accelerator, input_dir)
        step = None if folder is None else saved_step(folder)
        if folder is None or step is None:
            return None
        root = self._root.resolve()
        if folder.is_relative_to(root):
            self.last = SavedState(folder.relative_to(root).as_posix(), step)
        return step

    def save_last(self, accelerator: Any, step: int) -> None:
        """Save where the script would look for it, unless it has just saved or cannot resume."""
        saved = self.last
        if saved is not None and saved.step == step:
            return
        if accelerator.project_configuration.automatic_checkpoint_naming and saved is not None:
            accelerator.save_state()
            return
        name = _DEFAULT_NAME.format(step=step) if self.resumable else None
        if saved is not None:
            name = name_for_step(saved, step)
        if name is not None:
            accelerator.save_state(str(self._root / name))
        elif self._is_main:
            last = f"the last one is {saved.name}" if saved else "the script saves none"
            message = f"stopped at step {step} without a checkpoint: {last}"
            self._events.warn("stop-without-checkpoint", message)

    def log_complete(self, save: Save, marker: CheckpointMarker) -> None:
        """Log a complete checkpoint; called on rank 0, from another thread."""
        size = sum(file.bytes for file in marker.files)
        self._events.write(
            "checkpoint",
            f"checkpoint at step {save.step}: {save.name}, {size:,} bytes",
            step=save.step,
            path=str(self._root / save.name),
            bytes=size,
            seconds=save.seconds,
        )

    def _name_of(self, accelerator: Any, output_dir: Any) -> str | None:
        """Return the path of a save below the checkpoints; None if it is elsewhere."""
        folder, root = saved_folder(accelerator, output_dir), self._root.resolve()
        if folder is not None and folder.is_relative_to(root) and folder != root:
            return folder.relative_to(root).as_posix()
        if self._is_main and not self._warned_elsewhere:
            self._warned_elsewhere = True
            self._events.warn(
                "entry-checkpoint-elsewhere",
                f"{self._entry} saves its state to {folder}, which is lost with the "
                "instance; pass {checkpoints} in entry_args, and save to a folder below it",
            )
        return None
