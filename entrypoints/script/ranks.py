"""What the ranks of an observed script agree on, without a collective: its saves and its stop.

A script may call ``save_state`` on all ranks or on the main process alone, and ranks run ahead of
each other, so a collective of ours could hang. A thread of each rank publishes its progress in the
job's key-value store once per tick instead. Rank 0 marks a folder complete when every rank has
saved to it or has passed the step without saving, and chooses the step after which all ranks stop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.distributed.messages import KeyValueStore, Messages, job_key
from sm_train.entrypoints.distributed.object_exchange import ObjectExchange
from sm_train.entrypoints.job_interface.checkpoint_layout import CheckpointFile, CheckpointMarker
from sm_train.entrypoints.monitoring.heartbeat import heartbeat_folder
from sm_train.entrypoints.script import saved_states
from sm_train.entrypoints.script.stop_agreement import NO_STOP, TICK_SECONDS, StopAgreement

END_TIMEOUT = 120.0
"""Seconds in which the last save of all ranks must be complete when the script has ended."""

_MAX_SAVES = 64


@dataclass(frozen=True)
class ScriptRank:
    """This process among those of the job."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    nodes: int

    @property
    def leads_node(self) -> bool:
        """Whether it lists the files of its node."""
        return self.local_rank == 0


@dataclass(frozen=True)
class Save:
    """A call of ``save_state`` after ``step`` steps, to a folder below the checkpoints."""

    name: str
    step: int
    seconds: float = 0.0


class FolderStore:
    """A :class:`KeyValueStore` for the processes of one node: a file for each key.

    The watchdog removes the folder when the node's first process has ended.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        write_atomic(self._path(key), value)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        if not self._folder.is_dir():
            raise FileNotFoundError(self._folder)
        return all(self._path(key).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        existed = self._path(key).exists()
        self._path(key).unlink(missing_ok=True)
        return existed

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


def open_messages(info: ScriptRank) -> Messages | None:
    """Connect to the messages of the job's ranks; None for a single process.

    On one node it is a folder in memory. The agent of torchrun hosts that of several nodes. Where
    MPI starts the processes there is no agent, and the default process group's store is used, which
    exists by then.
    """
    if info.world_size == 1:
        return None
    return Messages(_open_store(info), job_key())


def _open_store(info: ScriptRank) -> KeyValueStore:
    if info.nodes == 1:
        return FolderStore(heartbeat_folder() / "store")
    import torch.distributed as dist

    distributed: Any = dist
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        default = distributed.distributed_c10d._get_default_store()
        return distributed.PrefixStore("sm-train", default)  # type: ignore[no-any-return]
    # A connection of its own: a wait in another thread does not block it.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(host, port, is_master=False, timeout=timedelta(minutes=30))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"sm-train/{attempt}", store)  # type: ignore[no-any-return]


def agree_on_states(
    states: Sequence[saved_states.SavedState], info: ScriptRank, messages: Messages | None
) -> list[saved_states.SavedState]:
    """Return the states that are complete on every node, newest first.

    ``states`` are those that this node holds; only the rank that leads the node has to know them.
    """
    if messages is None:
        return list(states)
    exchange = ObjectExchange(messages, info.rank, info.world_size)
    held = exchange.all_gather(list(states) if info.leads_node else None)
    by_node = [of_node for of_node in held if of_node is not None]
    return [state for state in by_node[0] if all(state in of_node for of_node in by_node)]


class ScriptRanks:
    """This rank's part in the agreement; a thread calls :meth:`tick`.

    ``on_complete`` is called on rank 0, from the thread, with each save and its marker.
    ``step`` is read from the observer at each tick.
    """

    def __init__(
        self,
        checkpoints: Path,
        info: ScriptRank,
        messages: Messages | None,
        *,
        step: Callable[[], int],
        steps_per_second: Callable[[], float],
        on_complete: Callable[[Save, CheckpointMarker], None],
    ) -> None:
        self._checkpoints, self._info, self._messages = checkpoints, info, messages
        self._step, self._on_complete = step, on_complete
        self._lock = threading.Lock()
        self.stop = StopAgreement(
            messages, self._lock, step=step, steps_per_second=steps_per_second
        )
        self._saving: Save | None = None
        self._saves: list[Save] = []
        self._pending: list[Save] = []
        self._ended = False
        self._answered = 0
        self._sealed = 0
        self._seal: Save | None = None

    # ------------------------------------------------------------------ by the script's thread

    def begin_save(self, name: str, step: int) -> None:
        """Note that this rank begins to save, before it writes a file."""
        save = Save(name, step)
        with self._lock:
            self._saving = save
            self._pending = [pending for pending in self._pending if pending.name != name]
            if self._seal is not None and self._seal.name == name:
                self._seal = None
            if self._info.leads_node:
                saved_states.begin(self._checkpoints, name)

    def end_save(self, *, seconds: float | None) -> None:
        """Note that this rank has saved; ``seconds`` is None if that failed."""
        with self._lock:
            save, self._saving = self._saving, None
            if save is None or seconds is None:
                return
            save = Save(save.name, save.step, seconds)
            self._saves = [*self._saves, save][-_MAX_SAVES:]
            if self._info.rank == 0:
                self._pending.append(save)

    def finish(self, alive: Callable[[], None]) -> bool:
        """Wait until the last saves are complete on all ranks; return whether they are.

        Call it when the script has ended, after the thread that ticks. The other ranks wait until
        rank 0 has finished, and call ``alive`` meanwhile.
        """
        self._ended = True
        deadline = time.monotonic() + END_TIMEOUT
        try:
            while not self._has_finished():
                if self._info.rank == 0 and time.monotonic() > deadline:
                    self._release_ranks()
                    return False
                alive()
                time.sleep(TICK_SECONDS / 5)
            self._release_ranks()
        except Exception:  # Rank 0 has ended, and with it the store.
            return self._info.rank != 0
        return True

    def _has_finished(self) -> bool:
        self.tick()
        if self._info.rank:
            return self._messages is None or self._messages.has(["finished"])
        return not self._pending and self._seal is None

    def _release_ranks(self) -> None:
        """End the wait of the others; rank 0 calls it.

        The agent of torchrun hosts the store and ends after all agents, so it would outlive rank 0.
        """
        if self._info.rank == 0 and self._messages is not None:
            self._messages.put("finished", b"")

    # ------------------------------------------------------------------ by the thread

    def tick(self) -> None:
        """Publish this rank's progress, and do what the agreement needs next."""
        self._publish()
        if self._info.leads_node and self._info.rank:
            self._answer_seal()
        if self._info.rank == 0:
            self._seal_pending()
        self._agree_on_stop()

    def _publish(self) -> None:
        if self._messages is None:
            return
        with self._lock:
            status = {
                "step": self._step(),
                "saving": self._saving and [self._saving.name, self._saving.step],
                "saves": [[save.name, save.step] for save in self._saves],
                "ended": self._ended,
                **self.stop.status(),
            }
        self._messages.put_json(f"rank/{self._info.rank}", status)

    def _statuses(self) -> list[dict[str, Any]]:
        """Return what the ranks have published; one that has not begun is at step -1."""
        assert self._messages is not None
        unknown: dict[str, Any] = {"step": -1, "saving": None, "saves": [], "ended": False}
        unknown |= NO_STOP
        statuses = []
        for rank in range(self._info.world_size):
            statuses.append(self._messages.get_json(f"rank/{rank}") or unknown)
        return statuses

    def _seal_pending(self) -> None:
        """Mark the oldest pending save complete once all ranks are past it; on rank 0."""
        with self._lock:
            save = self._pending[0] if self._pending and self._seal is None else None
        if save is not None and self._all_past(save):
            with self._lock:
                if save not in self._pending:
                    return
                self._pending.remove(save)
                self._seal = save
                self._sealed += 1
            if self._messages is not None:
                self._messages.put_json(f"seal/{self._sealed}", [save.name, save.step])
        if self._seal is not None:
            self._write_marker(self._seal)

    def _all_past(self, save: Save) -> bool:
        if self._messages is None:
            return True
        key = [save.name, save.step]
        return all(
            key in status["saves"]
            or (status["saving"] != key and (status["step"] > save.step or status["ended"]))
            for status in self._statuses()
        )

    def _write_marker(self, save: Save) -> None:
        keys = [f"files/{self._sealed}/{node}" for node in range(1, self._info.nodes)]
        if self._messages is not None and keys and not self._messages.has(keys):
            return
        folder = self._checkpoints / save.name
        try:
            files = saved_states.list_files(folder)
            for key in keys:
                assert self._messages is not None
                files += [CheckpointFile(**fields) for fields in self._messages.get_json(key) or ()]
            with self._lock:
                if self._saving is not None:
                    return  # Accelerate may remove older folders: a new file would make it fail
                # The script may have begun to write the folder again, or removed it.
                current, self._seal = self._seal is save, None
                if not current or not folder.is_dir():
                    return
                marker = saved_states.mark_complete(
                    self._checkpoints, save.name, save.step, self._info.world_size, files
                )
        except OSError:
            self._seal = None
            return
        self._on_complete(save, marker)

    def _answer_seal(self) -> None:
        """List the node's files of the save that rank 0 seals; on the node's first rank."""
        assert self._messages is not None
        number = self._answered + 1
        sealed = self._messages.get_json(f"seal/{number}")
        if sealed is None:
            return
        name, _ = sealed
        folder = self._checkpoints / name
        try:
            files = [asdict(file) for file in saved_states.list_files(folder)]
        except OSError:
            files = []
        saved_states.end(self._checkpoints, name)
        self._messages.put_json(f"files/{number}/{self._info.node}", files)
        self._answered = number

    def _agree_on_stop(self) -> None:
        if self._messages is None:
            self.stop.stop_alone()
            return
        if self._info.rank == 0:
            self.stop.propose(self._statuses())
        self.stop.answer()
