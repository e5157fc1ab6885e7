"""Checks the settings of a run with its own training script (``entry``)."""

from __future__ import annotations

from collections.abc import Iterator

from sm_train.entrypoints.common.entry_arguments import CHANNEL, RESUME, placeholders
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

ENTRY_SHARDED = Check(
    "entry-sharded",
    ("warning",),
    means="The run has its own training script (`entry`) and several instances, and `sharded: "
    "true` gives each instance another part of a channel.",
    impact="Accelerate and PyTorch's DistributedSampler assign samples to ranks by their global "
    "number and expect every instance to see the same files. The instances would train on parts of "
    "their parts, and epochs would differ in length: the job hangs at the end of the shortest.",
    fix="Leave `sharded` out; every instance then sees all files. Or let the script split by rank "
    "within the instance.",
    source="Accelerate documentation, Internal mechanisms: BatchSamplerShard (2026-11)",
)
ENTRY_CHANNEL = Check(
    "entry-channel",
    ("error",),
    means="`entry_args` has a placeholder `{channel.NAME}` of a channel that the job does not get.",
    impact="The script would get the path of a folder that does not exist.",
    fix="Add the channel to `channels`, or correct the name; the training data are `train`.",
)
ENTRY_RESUME = Check(
    "entry-resume",
    ("info",),
    means="`entry_args` passes no checkpoint to the script: neither `{resume}` nor `latest`.",
    impact="A job that follows a lost or stopped one starts at step 0, unless the script looks for "
    "its checkpoints itself.",
    fix="Pass what the script accepts, such as `[--output_dir, '{checkpoints}', "
    "--resume_from_checkpoint, '{resume}']`.",
)


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
