"""Atomic checkpoints for a custom training loop, which resumes from the files of any node."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.checkpoints.resume_point import Nodes, find_latest, remove_later
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardedTensorError, load_into
from sm_train.entrypoints.checkpoints.stored_steps import StoredSteps
from sm_train.entrypoints.distributed.object_exchange import all_gather
from sm_train.entrypoints.job_interface.node_description import uploads_checkpoints
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.script.current_job import current_job, script_process
from sm_train.entrypoints.script.object_state import (
    ObjectState,
    Targets,
    Tree,
    decode,
    object_state,
    shards,
)
from torch import nn

_STATE = "state.json"
_FINGERPRINT = "own-loop"


class Stateful(Protocol):
    """A module, an optimizer, a schedule, a :class:`ShardDataset`, or any object like them."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, texts, and lists and dictionaries of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore what ``state_dict`` returned."""


class Checkpointer:
    """Saves and restores ``objects`` and each rank's random state.

    All ranks hold the objects alike, or shards of them: PyTorch's ``fully_shard`` (FSDP2). Each
    rank saves its own shards in the layout of the built-in training, and a job with another number
    of processes can resume. A checkpoint counts once all files of all nodes are written; `sm-train`
    and the next job verify them by size and digest.
    """

    def __init__(self, **objects: Stateful) -> None:
        """Name the objects: ``Checkpointer(model=model, optimizer=optimizer, data=dataset)``.

        Create them first, and shard the model before its optimizer is created.

        Raises:
            Error: a checkpoint cannot hold the state of an object.
        """
        self._objects = objects
        self._process = process = script_process()
        rank = process.rank
        self._rank = CheckpointRank(
            rank.rank, rank.world_size, rank.node, rank.local_rank, rank.world_size // rank.nodes
        )
        self._folder = process.paths.checkpoints
        self._writer = AsyncCheckpointer(
            self._folder,
            self._rank,
            fingerprint=_FINGERPRINT,
            keep=process.config.checkpoint.keep_last,
            events=process.events,
            all_gather=all_gather,
            background=BackgroundWork(current_job().device),
            stored=StoredSteps(self._folder, uploads=uploads_checkpoints(process.paths)),
        )
        for name, target in objects.items():
            _require_savable(name, target)

    def restore(self) -> int:
        """Load the newest complete checkpoint and return its step; 0 if there is none.

        A collective: all ranks call it.

        Raises:
            Error: the checkpoint holds other objects, or other tensors.
        """
        nodes = Nodes(self._rank, all_gather, current_job().device)
        found = find_latest(self._folder, nodes, self._process.events.warn)
        if self._rank.local_main:
            remove_later(self._folder, found.step if found else None)
        if found is None:
            return 0
        trees: dict[str, Tree] = json.loads((found.folder / _STATE).read_bytes())
        if trees.keys() != self._objects.keys():
            raise Error(
                f"{found.folder.name} holds {', '.join(trees)}; the script's checkpointer has "
                f"{', '.join(self._objects)}; give the run another name to start over"
            )
        files = checkpoint_files.shard_files(found.folder)
        for name, tree in trees.items():
            self._load(name, tree, files)
        if found.world_size == self._rank.world_size:
            path = found.folder / _random_file(self._rank.rank)
            _set_random_state(torch.load(path, weights_only=True))
        self._writer.stored.restored(found.step)
        self._process.observer.loop.step = found.step
        return found.step

    @torch.no_grad()
    def _load(self, name: str, tree: Tree, files: list[Path]) -> None:
        target = self._objects[name]
        targets = Targets(name, target)
        state = decode(tree, targets.tensor)
        own = {spec: shard.tensor for spec, shard in shards(targets.tensors).items()}
        try:
            load_into(files, own)
        except ShardedTensorError as error:
            raise Error(f"Checkpointer: {name}: {error}") from None
        target.load_state_dict(state)

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps; a collective: all ranks call it.

        If a rank cannot write, the checkpoint is abandoned with a warning and training continues.
        `checkpoint.keep_last` earlier ones stay.

        Raises:
            Error: a checkpoint cannot hold the state of an object.
        """
        self._process.observer.loop.enter(Phase.CHECKPOINT)
        states = {
            name: object_state(name, held.state_dict()) for name, held in self._objects.items()
        }
        tensors = {
            name: tensor for state in states.values() for name, tensor in state.tensors.items()
        }
        self._writer.save_async(step, shards(tensors), {}, self._files(states))
        self._writer.wait()
        self._writer.commit()
        self._process.observer.loop.report_failed_saves(self._writer.failures)
        self._process.observer.loop.enter(Phase.SCRIPT)

    def _files(self, states: Mapping[str, ObjectState]) -> dict[str, Callable[[Path], None]]:
        """Return what this rank writes besides tensors."""
        files: dict[str, Callable[[Path], None]] = {
            _random_file(self._rank.rank): partial(torch.save, _random_state())
        }
        if self._rank.rank == 0:
            trees = {name: state.tree for name, state in states.items()}
            files[_STATE] = checkpoint_files.save_bytes(json.dumps(trees).encode())
        return files


def _require_savable(name: str, target: Stateful) -> None:
    """Refuse an object whose state no checkpoint can hold.

    An optimizer has no state before its first step: a step of another one with the same settings
    shows what it will be.

    Raises:
        Error: it cannot be saved.
    """
    weights: list[Any] = []
    if isinstance(target, nn.Module):
        weights = [*target.parameters()]
    elif isinstance(target, torch.optim.Optimizer):
        weights = [weight for group in target.param_groups for weight in group["params"]]
    if any(type(weight).__name__ == "FlatParameter" for weight in weights):
        raise Error(
            f"Checkpointer: {name} is sharded by FullyShardedDataParallel, which a checkpoint "
            "cannot hold; use torch.distributed.fsdp.fully_shard"
        )
    object_state(name, target.state_dict())
    if isinstance(target, torch.optim.Optimizer) and not target.state:
        object_state(name, _state_after_a_step(target))


def _state_after_a_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the state of another optimizer of the class; empty if it takes further arguments."""
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros(2, 2)
    # AdamW keeps defaults that its constructor does not take.
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    try:
        other = type(optimizer)([weight], **settings)
        other.step()
        return other.state_dict()
    except Exception:
        return {}


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
