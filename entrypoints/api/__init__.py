"""sm-train in Python.

Inside a job, a script of your own (``entry``) builds its loop from ``current_job``,
``ShardDataset``, ``Checkpointer``, ``EventLog`` and ``Heartbeat`` (docs/jobs.md). Importing this
package imports neither torch nor boto3: each name is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_train.entrypoints.common.error import Error
    from sm_train.entrypoints.script.checkpointer import Checkpointer
    from sm_train.entrypoints.script.current_job import CurrentJob, Heartbeat, current_job
    from sm_train.entrypoints.script.current_job import LoopEventLog as EventLog
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
_SOURCES = {
    "Checkpointer": (f"{_SCRIPT}.checkpointer", "Checkpointer"),
    "CurrentJob": (f"{_SCRIPT}.current_job", "CurrentJob"),
    "Error": ("sm_train.entrypoints.common.error", "Error"),
    "EventLog": (f"{_SCRIPT}.current_job", "LoopEventLog"),
    "Heartbeat": (f"{_SCRIPT}.current_job", "Heartbeat"),
    "ShardDataset": (f"{_SCRIPT}.shard_dataset", "ShardDataset"),
    "current_job": (f"{_SCRIPT}.current_job", "current_job"),
}
"""Name → module and name of its definition, which is imported at the first use (PEP 562)."""


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _SOURCES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
