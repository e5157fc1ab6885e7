"""Checks the settings of a run with its own training script (``entry``)."""

from __future__ import annotations

from collections.abc import Iterator

from sm_train.entrypoints.job_interface.job_config import CHANNEL, RESUME, placeholders
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

ENTRY_SHARDED = Check("entry-sharded", ("warning",))
ENTRY_CHANNEL = Check("entry-channel", ("error",))
ENTRY_RESUME = Check("entry-resume", ("info",))


def entry_findings(config: RunConfig) -> Iterator[Finding]:
    """Check the channels and arguments of the run's own script."""
    if config.entry is None:
        return
    yield from _sharded_findings(config)
    known = {"train", *config.channels}
    known |= {"validation"} if config.data.validation else set()
    known |= {"index"} if config.index_uri else set()
    known |= {"model"} if config.model.components else set()
    known |= {"previous"} if len(config.stages) > 1 else set()
    names = [name for argument in config.entry_args for name in placeholders(argument)]
    for name in names:
        if name.startswith(CHANNEL) and (channel := name.removeprefix(CHANNEL)) not in known:
            yield ENTRY_CHANNEL.found(
                "error",
                "entry_args",
                f"{{{name}}}: the job has no channel {channel}",
                f"add it to channels; the job has {', '.join(sorted(known))}",
            )
    if RESUME not in names and "latest" not in config.entry_args:
        yield ENTRY_RESUME.found(
            "info",
            "entry_args",
            f"{config.entry} gets no checkpoint to resume from",
            "pass {resume} to the script's option for it",
        )


def _sharded_findings(config: RunConfig) -> Iterator[Finding]:
    if all(stage.instances == 1 for stage in config.stages):
        return
    sharded = {"data.sharded": config.train_sharded}
    sharded |= {
        f"channels.{name}.sharded": channel.sharded for name, channel in config.channels.items()
    }
    for where, is_sharded in sharded.items():
        if is_sharded:
            yield ENTRY_SHARDED.found(
                "warning",
                where,
                f"each instance gets another part of the data, but {config.entry} is started as "
                "one job of all ranks; Accelerate expects the same data on all instances",
                "leave sharded out",
            )
