"""Atomic checkpoints for a custom training loop, which resumes from the files of any node."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.async_checkpointer import CheckpointRank
from sm_train.entrypoints.checkpointing.resume import Nodes, find_latest, remove_later
from sm_train.entrypoints.common.checkpoint_layout import CheckpointFile, step_folder_name
from sm_train.entrypoints.common.error import Error
from sm_train.entrypoints.distributed.object_exchange import all_gather
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.script.current_job import current_job, script_process

_STATE = "state.pt"
_FINGERPRINT = "own-loop"


class Stateful(Protocol):
    """A module, an optimizer, a schedule, a :class:`ShardDataset`, or any object like them."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, texts, and lists and dictionaries of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore what ``state_dict`` returned."""


class Checkpointer:
    """Saves and restores ``objects``, which all ranks hold alike, and each rank's random state.

    A checkpoint counts once all files of all nodes are written; `sm-train` and the next job verify
    them by size and digest. For weights that are sharded over ranks use PyTorch's
    ``torch.distributed.checkpoint``.
    """

    def __init__(self, **objects: Stateful) -> None:
        """Name the objects: ``Checkpointer(model=model, optimizer=optimizer, data=dataset)``."""
        self._objects = objects
        self._process = process = script_process()
        rank = process.rank
        self._rank = CheckpointRank(
            rank.rank, rank.world_size, rank.node, rank.local_rank, rank.world_size // rank.nodes
        )
        self._folder = process.paths.checkpoints

    def restore(self) -> int:
        """Load the newest complete checkpoint and return its step; 0 if there is none.

        A collective: all ranks call it.

        Raises:
            Error: the checkpoint holds other objects.
        """
        nodes = Nodes(self._rank, all_gather, current_job().device)
        found = find_latest(self._folder, nodes, self._process.events.warn)
        if self._rank.local_main:
            remove_later(self._folder, found.step if found else None)
        if found is None:
            return 0
        states = torch.load(found.folder / _STATE, map_location="cpu", weights_only=True)
        if states.keys() != self._objects.keys():
            raise Error(
                f"{found.folder.name} holds {', '.join(states)}; the script's checkpointer has "
                f"{', '.join(self._objects)}; give the run another name to start over"
            )
        for name, state in states.items():
            self._objects[name].load_state_dict(state)
        if found.world_size == self._rank.world_size:
            path = found.folder / _random_file(self._rank.rank)
            _set_random_state(torch.load(path, weights_only=True))
        self._process.observer.step = found.step
        return found.step

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps; a collective: all ranks call it.

        If a rank cannot write, the checkpoint is abandoned with a warning and training continues.
        `checkpoint.keep_last` earlier ones stay.
        """
        self._process.observer.enter(Phase.CHECKPOINT)
        started = time.monotonic()
        folder = self._folder / step_folder_name(step)
        outcome: list[CheckpointFile] | str
        try:
            outcome = self._write(folder, step)
        except OSError as error:
            outcome = f"{type(error).__name__}: {error}"
        outcomes = all_gather(outcome)
        failures = [one for one in outcomes if isinstance(one, str)]
        files = [file for one in outcomes if not isinstance(one, str) for file in one]
        if self._rank.local_main:
            if failures:
                manifest.remove(folder)
            else:
                manifest.write_marker(folder, step, self._rank.world_size, _FINGERPRINT, files)
        if self._rank.rank == 0:
            self._log(step, folder, files, failures, time.monotonic() - started)
        self._process.observer.enter(Phase.SCRIPT)

    def _write(self, folder: Path, step: int) -> list[CheckpointFile]:
        if self._rank.local_main:
            manifest.prune(self._folder, self._process.config.checkpoint.keep_last, step)
            manifest.invalidate(folder)
        folder.mkdir(parents=True, exist_ok=True)
        contents: dict[str, Mapping[str, Any]] = {_random_file(self._rank.rank): _random_state()}
        if self._rank.rank == 0:
            contents[_STATE] = {name: one.state_dict() for name, one in self._objects.items()}
        return [
            manifest.write_file(folder, name, partial(torch.save, content))
            for name, content in contents.items()
        ]

    def _log(
        self,
        step: int,
        folder: Path,
        files: list[CheckpointFile],
        failures: list[str],
        seconds: float,
    ) -> None:
        events = self._process.events
        if failures:
            message = f"no checkpoint at step {step}: {failures[0]}; training continues"
            events.warn("checkpoint-failed", message, step=step)
            return
        size = sum(file.bytes for file in files)
        text = f"checkpoint at step {step}: {size / 1e9:.2f} GB in {seconds:.1f} s"
        events.write("checkpoint", text, step=step, path=str(folder), bytes=size, seconds=seconds)


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def _random_state() -> dict[str, Any]:
    """Return the states of all random generators, as types that load without pickle."""
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
