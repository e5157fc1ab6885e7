"""sm-train in Python.

Inside a job, a script of your own (``entry``) builds its loop from ``current_job``,
``ShardDataset``, ``Checkpointer``, ``EventLog`` and ``Heartbeat`` (docs/jobs.md). Importing this
package imports neither torch nor boto3: each name is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_train.entrypoints.script.checkpointer import Checkpointer
    from sm_train.entrypoints.script.current_job import (
        CurrentJob,
        Error,
        EventLog,
        Heartbeat,
        current_job,
    )
    from sm_train.entrypoints.script.shard_dataset import ShardDataset

__all__ = [
    "Checkpointer",
    "CurrentJob",
    "Error",
    "EventLog",
    "Heartbeat",
    "ShardDataset",
    "current_job",
]

_SCRIPT = "sm_train.entrypoints.script"
_MODULES = {
    "Checkpointer": f"{_SCRIPT}.checkpointer",
    "CurrentJob": f"{_SCRIPT}.current_job",
    "Error": f"{_SCRIPT}.current_job",
    "EventLog": f"{_SCRIPT}.current_job",
    "Heartbeat": f"{_SCRIPT}.current_job",
    "ShardDataset": f"{_SCRIPT}.shard_dataset",
    "current_job": f"{_SCRIPT}.current_job",
}
"""Name → the module that defines it, imported at the first use (PEP 562)."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
