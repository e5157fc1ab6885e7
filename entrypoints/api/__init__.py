"""sm-train in Python.

On a laptop, :class:`Run` loads a run file, checks and prices it, and starts it on SageMaker or on
this machine. :class:`Job` follows, reviews and diagnoses what was started. :func:`pack` makes
shards, :func:`sample` and :func:`compare` generate images from checkpoints, and :func:`export`
writes models for other tools.

A function for ``sm-train enrich`` gets an ``EnrichmentBatch``.

Inside a job, a script of your own (``entry``) builds its loop from ``current_job``,
``ShardDataset``, ``Checkpointer``, ``EventLog`` and ``Heartbeat`` (docs/jobs.md).

Errors are subclasses of :class:`Error`. Importing this package imports neither torch nor boto3:
each name is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ != "sm_train":  # a second copy would have a second of each lazily loaded state
    raise ImportError(f"import sm_train instead of {__name__}: this folder is the package itself")

if TYPE_CHECKING:
    from sm_train.entrypoints.base.error import Error
    from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import EnrichmentBatch
    from sm_train.entrypoints.script.checkpointer import Checkpointer
    from sm_train.entrypoints.script.current_job import CurrentJob, Heartbeat, current_job
    from sm_train.entrypoints.script.current_job import LoopEventLog as EventLog
    from sm_train.entrypoints.script.shard_dataset import ShardDataset
    from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis
    from sm_train.toolkit.analysis.metrics import Metrics
    from sm_train.toolkit.analysis.review.review_model import Review
    from sm_train.toolkit.api.checks import Checks
    from sm_train.toolkit.api.job import Job
    from sm_train.toolkit.api.local_run import LocalRun
    from sm_train.toolkit.api.model_export import export
    from sm_train.toolkit.api.run import Run
    from sm_train.toolkit.api.sampling import Samples, compare, sample
    from sm_train.toolkit.base.errors import (
        AccessError,
        CapacityError,
        JobFailedError,
        OverBudgetError,
        PreflightError,
        ServiceError,
        StalledError,
        UsageError,
    )
    from sm_train.toolkit.data_prep.pack_function import pack
    from sm_train.toolkit.data_prep.packing.pack import PackResult
    from sm_train.toolkit.planning.cost_result import Cost
    from sm_train.toolkit.runs.run_status import Status

    __version__: str

__all__ = [
    "AccessError",
    "CapacityError",
    "Checkpointer",
    "Checks",
    "Cost",
    "CurrentJob",
    "Diagnosis",
    "EnrichmentBatch",
    "Error",
    "EventLog",
    "Heartbeat",
    "Job",
    "JobFailedError",
    "LocalRun",
    "Metrics",
    "OverBudgetError",
    "PackResult",
    "PreflightError",
    "Review",
    "Run",
    "Samples",
    "ServiceError",
    "ShardDataset",
    "StalledError",
    "Status",
    "UsageError",
    "__version__",
    "compare",
    "current_job",
    "export",
    "pack",
    "sample",
]

_SCRIPT = "sm_train.entrypoints.script"
_TOOLKIT = "sm_train.toolkit"
_SOURCES = {
    "Checkpointer": (f"{_SCRIPT}.checkpointer", "Checkpointer"),
    "Checks": (f"{_TOOLKIT}.api.checks", "Checks"),
    "Cost": (f"{_TOOLKIT}.planning.cost_result", "Cost"),
    "CurrentJob": (f"{_SCRIPT}.current_job", "CurrentJob"),
    "Diagnosis": (f"{_TOOLKIT}.analysis.diagnose.diagnosis", "Diagnosis"),
    "Error": ("sm_train.entrypoints.base.error", "Error"),
    "EventLog": (f"{_SCRIPT}.current_job", "LoopEventLog"),
    "Heartbeat": (f"{_SCRIPT}.current_job", "Heartbeat"),
    "EnrichmentBatch": (
        "sm_train.entrypoints.data_prep.enrichment.enrichment_batch",
        "EnrichmentBatch",
    ),
    "Job": (f"{_TOOLKIT}.api.job", "Job"),
    "LocalRun": (f"{_TOOLKIT}.api.local_run", "LocalRun"),
    "Metrics": (f"{_TOOLKIT}.analysis.metrics", "Metrics"),
    "PackResult": (f"{_TOOLKIT}.data_prep.packing.pack", "PackResult"),
    "Review": (f"{_TOOLKIT}.analysis.review.review_model", "Review"),
    "Run": (f"{_TOOLKIT}.api.run", "Run"),
    "Samples": (f"{_TOOLKIT}.api.sampling", "Samples"),
    "ShardDataset": (f"{_SCRIPT}.shard_dataset", "ShardDataset"),
    "Status": (f"{_TOOLKIT}.runs.run_status", "Status"),
    "compare": (f"{_TOOLKIT}.api.sampling", "compare"),
    "current_job": (f"{_SCRIPT}.current_job", "current_job"),
    "export": (f"{_TOOLKIT}.api.model_export", "export"),
    "pack": (f"{_TOOLKIT}.data_prep.pack_function", "pack"),
    "sample": (f"{_TOOLKIT}.api.sampling", "sample"),
    **{
        name: (f"{_TOOLKIT}.base.errors", name)
        for name in (
            "AccessError",
            "CapacityError",
            "JobFailedError",
            "OverBudgetError",
            "PreflightError",
            "ServiceError",
            "StalledError",
            "UsageError",
        )
    },
}
"""Name → module and name of its definition, which is imported at the first use (PEP 562)."""

_BUNDLE_VERSION = Path(__file__).with_name("version.txt")
"""Only a job's bundle has this file: the version that made it. A bundle has no toolkit."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _SOURCES:
        module, attribute = _SOURCES[name]
        if module.startswith(_TOOLKIT) and _BUNDLE_VERSION.exists():
            raise _laptop_only(name)
        value = getattr(_imported(module), attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(module: str) -> Any:
    """Import a module; one of a wing that is missing is named in one line."""
    if not module.startswith(_TOOLKIT):
        return import_module(module)
    return import_module("sm_train.toolkit.base.wings").wing_module(module)


def _version() -> str:
    if _BUNDLE_VERSION.exists():
        return _BUNDLE_VERSION.read_text(encoding="utf-8").strip()
    from importlib.metadata import version

    return version("sm-train")


def _laptop_only(name: str) -> Exception:
    from sm_train.entrypoints.base.error import Error

    return Error(
        f"sm_train.{name} works on a laptop, not in a job: a job has ShardDataset, Checkpointer, "
        "EventLog, Heartbeat, current_job and Error"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
