"""Checks between sections of the run file that are each valid alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from sm_train.cost.accelerators import accelerator
from sm_train.cost.instances import instance_type
from sm_train.entrypoints.job_interface.index_location import index_channel, index_uri
from sm_train.entrypoints.job_interface.job_config import FP8_PYTORCH, FSDP2_PYTORCH, major_minor
from sm_train.entrypoints.job_interface.optimizer_rules import problem
from sm_train.estimators.config.cluster import SMDDP_PYTORCH, ClusterSection
from sm_train.estimators.config.data import (
    ChannelSection,
    DataSection,
    FileSystemInputSection,
    SourceSection,
)
from sm_train.estimators.config.fields import MAX_JOB_NAME
from sm_train.estimators.config.model import ModelSection
from sm_train.estimators.config.presets import preset_names, resolution_factor
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.config.training import TrainingSection

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value of the run file."""

_JOB_NAME_SUFFIX = len("--") + len("-0001")
"""Characters that a job name adds to the names of run and stage (naming.job_name)."""

_SELECTIVE_PYTORCH = (2, 5)
"""The oldest image whose diffusers takes a function for activation checkpointing: 0.36 in its
pinned requirements, 0.31 in those of PyTorch 2.3."""


@dataclass(frozen=True)
class Problem:
    """One mistake in the run file: its path, the value (None to leave it out) and the fix."""

    path: KeyPath
    value: object
    message: str

    def __hash__(self) -> int:
        # The value may be a list or a mapping, which cannot be hashed.
        return hash((self.path, self.message))


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run file that are valid by themselves; a section is None if it is not.

    ``stages`` are the valid ones, each with its index in the file. ``gpus_per_instance`` is None if
    the instance type is not known. ``channels`` are the run's own by name, None if one is not
    valid.
    """

    run: str
    stages: Sequence[tuple[int, StageSection]]
    gpus_per_instance: int | None
    cluster: ClusterSection | None
    training: TrainingSection | None
    model: ModelSection | None
    own_script: bool
    data: DataSection | None
    channels: Mapping[str, ChannelSection | None]


def cross_section_problems(parts: RunParts) -> list[Problem]:
    """Return the mistakes between the stages, and between the sections of a run file."""
    problems = list(_data_problems(parts))
    for number, (index, stage) in enumerate(parts.stages):
        path: KeyPath = ("stages", index)
        if stage.name in {earlier.name for _, earlier in parts.stages[:number]}:
            problems.append(
                Problem((*path, "name"), stage.name, "is already the name of an earlier stage")
            )
        problems += _stage_problems(parts, stage, path)
    return [*problems, *_section_problems(parts)]


def _data_problems(parts: RunParts) -> Iterator[Problem]:
    data = parts.data
    if data is None:
        return
    yield from _source_problems(data.sources, data, parts.channels, ("data",))
    if data.where is not None and data.index is False:
        reason = "selects by columns of the index; remove index: false"
        yield Problem(("data", "where"), data.where, reason)
    if data.extras and not parts.own_script:
        reason = "needs entry: a loop of yours; the built-in training reads image and caption"
        yield Problem(("data", "extras"), None, reason)


def _stage_problems(parts: RunParts, stage: StageSection, path: KeyPath) -> Iterator[Problem]:
    yield from _job_name_problems(parts.run, stage, path)
    if parts.model is not None and not parts.own_script:
        yield from _resolution_problems(stage, parts.model, path)
        yield from _prediction_problems(stage, parts.model, path)
    if parts.data is not None:
        yield from _source_problems(stage.sources, parts.data, parts.channels, path)
    if path[1] == 0:
        yield from _first_stage_problems(stage, path)
    if parts.cluster is not None:
        yield from _sharding_problems(stage, parts.cluster, path)
        yield from _checkpointing_problems(stage, parts.cluster, path)
        yield from _alternatives_problems(stage, parts.cluster, path)
    if parts.training is not None:
        yield from _optimizer_sharding_problems(parts.training, stage)
    if parts.gpus_per_instance is not None:
        yield from _batch_size_problems(stage, stage.instances * parts.gpus_per_instance, path)


def _section_problems(parts: RunParts) -> Iterator[Problem]:
    """Yield the mistakes between cluster, training, model and data."""
    cluster, training, model = parts.cluster, parts.training, parts.model
    if cluster is not None:
        yield from _file_system_problems(parts.data, parts.channels, cluster)
    if cluster is not None and training is not None:
        yield from _reduce_dtype_problems(training, cluster)
        yield from _text_encoder_problems(training, cluster)
        yield from _fp8_problems(training, cluster, model)
        yield from _optimizer_version_problems(training, cluster)
    if model is not None and model.preset is None and not parts.own_script:
        reason = f"is missing; write one of {', '.join(preset_names())}, or a preset file"
        yield Problem(("model", "preset"), None, reason)
    if model is not None and training is not None:
        yield from _adapter_problems(model, training)


def _source_problems(
    sources: Sequence[SourceSection],
    data: DataSection,
    channels: Mapping[str, ChannelSection | None],
    path: KeyPath,
) -> Iterator[Problem]:
    """Check that each source is a channel of its own, with an index of its own."""
    known = {"train": data.uri}
    known |= {name: (channel and channel.uri) or "" for name, channel in channels.items()}
    is_selected = any([data.where, *(source.where for source in sources)])
    has_index = (data.reader == "indexed" or is_selected) and data.index is not False
    indexes: dict[str | None, str] = {}
    for number, source in enumerate(sources):
        where = (*path, "sources", number, "channel")
        index = index_channel(source.channel)
        if source.channel not in known:
            names = ", ".join(sorted(known))
            yield Problem(where, source.channel, f"is no channel; add it to channels: {names}")
        elif source.channel in [earlier.channel for earlier in sources[:number]]:
            yield Problem(where, source.channel, "is already a source; add the weights")
        elif index in channels:
            yield Problem(where, source.channel, f"needs the channel name {index}; rename that one")
        elif uri := known[source.channel]:
            other = indexes.setdefault(index_uri(uri), source.channel)
            if has_index and other != source.channel:
                reason = f"has the shards of {other}; list one of them, with the sum of the weights"
                yield Problem(where, source.channel, reason)
        elif channels[source.channel] is not None:
            reason = "has no uri; write the S3 prefix that holds its index next to its file_system"
            yield Problem(where, source.channel, reason)


def _file_system_problems(
    data: DataSection | None,
    channels: Mapping[str, ChannelSection | None],
    cluster: ClusterSection,
) -> Iterator[Problem]:
    """Check that the jobs join a network that reaches the file systems."""
    if cluster.vpc is not None:
        return
    mounted: dict[KeyPath, FileSystemInputSection | None] = {
        ("channels", name): channel.file_system
        for name, channel in channels.items()
        if channel is not None
    }
    if data is not None:
        mounted["data",] = data.file_system
    for path, file_system in mounted.items():
        if file_system is not None:
            reason = "requires cluster.vpc: the network through which the jobs reach it"
            yield Problem((*path, "file_system", "id"), file_system.id, reason)


def _resolution_problems(
    stage: StageSection, model: ModelSection, path: KeyPath
) -> Iterator[Problem]:
    """Check that latents and patches have whole sizes."""
    if model.preset is None:
        return
    factor = resolution_factor(model.preset, model.preset_content)
    if stage.resolution % factor:
        lower = stage.resolution // factor * factor
        near = [multiple for multiple in (lower, lower + factor) if multiple]
        yield Problem(
            (*path, "resolution"),
            stage.resolution,
            f"must be a multiple of {factor} for {model.preset} (its autoencoder and patches); "
            f"write {' or '.join(map(str, near))}",
        )


def _prediction_problems(
    stage: StageSection, model: ModelSection, path: KeyPath
) -> Iterator[Problem]:
    """Check that the model's settings fit what a stage predicts in place of the model's own."""
    if stage.prediction_type is None:
        return
    settings = model.model_dump() | {"prediction_type": stage.prediction_type}
    try:
        ModelSection.model_validate(settings)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, prediction_type: ")
        yield Problem((*path, "prediction_type"), stage.prediction_type, message)


def _adapter_problems(model: ModelSection, training: TrainingSection) -> Iterator[Problem]:
    if model.lora is not None and training.optimizer.name == "muon":
        reason = (
            "orthogonalizes each factor of a LoRA adapter, and not their product, which is the "
            "update; write name: adamw"
        )
        yield Problem(("training", "optimizer", "name"), "muon", reason)


def _job_name_problems(run: str, stage: StageSection, path: KeyPath) -> Iterator[Problem]:
    length = len(run) + len(stage.name) + _JOB_NAME_SUFFIX
    if length > MAX_JOB_NAME:
        yield Problem(
            (*path, "name"),
            stage.name,
            f"the job name {run}--{stage.name}-0001 has {length} characters and SageMaker allows "
            f"{MAX_JOB_NAME}; shorten the name of the run or the stage by {length - MAX_JOB_NAME}",
        )


def _first_stage_problems(stage: StageSection, path: KeyPath) -> Iterator[Problem]:
    for key in ("init_from", "optimizer_state", "prediction_type", "objective"):
        value = getattr(stage, key)
        if value != StageSection.model_fields[key].default:
            yield Problem(
                (*path, key), value, "does not apply to the first stage, which has no previous one"
            )


def _reduce_dtype_problems(training: TrainingSection, cluster: ClusterSection) -> Iterator[Problem]:
    if training.reduce_dtype == "bf16" and cluster.backend == "smddp":
        reason = "SMDDP's sum of bf16 gradients is not documented; write fp32 or backend: nccl"
        yield Problem(("training", "reduce_dtype"), training.reduce_dtype, reason)


def sharding_obstacle(training: TrainingSection, cluster: ClusterSection) -> str | None:
    """Return why no stage can be sharded, with the fix; None if they can."""
    return _cluster_obstacle(cluster) or problem(training.optimizer.name, None, sharded=True)


def _fp8_problems(
    training: TrainingSection, cluster: ClusterSection, model: ModelSection | None
) -> Iterator[Problem]:
    if training.precision != "fp8":
        return
    kind, version = instance_type(cluster.instance_type), cluster.framework_version
    if not accelerator(kind.accelerator).has_fp8:
        reason = f"{cluster.instance_type} ({kind.accelerator}) has no fp8; write bf16"
    elif cluster.backend == "smddp" or (version and major_minor(version) < FP8_PYTORCH):
        reason = f"needs PyTorch {'.'.join(map(str, FP8_PYTORCH))} or newer; write bf16"
    elif model is not None and model.lora is not None:
        reason = "is not for adapters, whose base is frozen; write bf16"
    else:
        return
    yield Problem(("training", "precision"), training.precision, reason)


def _text_encoder_problems(training: TrainingSection, cluster: ClusterSection) -> Iterator[Problem]:
    if training.text_encoders == "sharded" and (reason := _cluster_obstacle(cluster)):
        yield Problem(("training", "text_encoders"), training.text_encoders, reason)


def _optimizer_sharding_problems(
    training: TrainingSection, stage: StageSection
) -> Iterator[Problem]:
    """Check an optimizer that needs whole weights; a newer PyTorch would not help it."""
    name = training.optimizer.name
    if _is_sharded(stage) and (reason := problem(name, None, sharded=True)):
        yield Problem(("training", "optimizer", "name"), name, f"stage {stage.name}: {reason}")


def _optimizer_version_problems(
    training: TrainingSection, cluster: ClusterSection
) -> Iterator[Problem]:
    version = cluster.framework_version
    if version is None and cluster.backend == "smddp":
        version = SMDDP_PYTORCH
    name = training.optimizer.name
    if reason := problem(name, version, sharded=False):
        if cluster.backend == "smddp":
            reason += " or backend: nccl"
        yield Problem(("training", "optimizer", "name"), name, reason)


def _sharding_problems(
    stage: StageSection, cluster: ClusterSection, path: KeyPath
) -> Iterator[Problem]:
    if _is_sharded(stage) and (reason := _cluster_obstacle(cluster)):
        yield Problem((*path, "sharding"), stage.sharding, reason)


def _is_sharded(stage: StageSection) -> bool:
    """Return whether the run file states that the stage is sharded."""
    return stage.sharding not in ("none", "auto")


def _cluster_obstacle(cluster: ClusterSection) -> str | None:
    version = cluster.framework_version
    if cluster.backend == "smddp":
        return "FSDP2 needs a newer PyTorch than SMDDP's; write backend: nccl"
    if version and major_minor(version) < FSDP2_PYTORCH:
        return f"FSDP2 needs PyTorch 2.6, and framework_version is {version}"
    return None


def _checkpointing_problems(
    stage: StageSection, cluster: ClusterSection, path: KeyPath
) -> Iterator[Problem]:
    version, choice = cluster.framework_version, stage.activation_checkpointing
    if choice == "selective" and version and major_minor(version) < _SELECTIVE_PYTORCH:
        reason = f"needs the diffusers of PyTorch 2.5, and framework_version is {version}"
        yield Problem((*path, "activation_checkpointing"), choice, reason)


def _alternatives_problems(
    stage: StageSection, cluster: ClusterSection, path: KeyPath
) -> Iterator[Problem]:
    """Check that each alternative can have as many GPUs.

    Another world size would be another effective batch size.
    """
    gpus = stage.instances * instance_type(cluster.instance_type).accelerators
    for alternative in cluster.alternatives:
        gpus_each = instance_type(alternative).accelerators
        if gpus % gpus_each:
            yield Problem(
                (*path, "instances"),
                stage.instances,
                f"{stage.instances} × {cluster.instance_type} have {gpus} GPUs, which is not a "
                f"multiple of the {gpus_each} of {alternative}; remove it from "
                "cluster.alternatives",
            )


def _batch_size_problems(stage: StageSection, gpus: int, path: KeyPath) -> Iterator[Problem]:
    product = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
    wanted = stage.effective_batch_size
    if wanted is None or wanted == product:
        return
    accumulation, remainder = divmod(wanted, stage.per_device_batch_size * gpus)
    fix = (
        f"write gradient_accumulation_steps: {accumulation}"
        if accumulation and not remainder
        else f"{wanted} is not a multiple of {stage.per_device_batch_size} × {gpus} GPUs"
    )
    yield Problem(
        (*path, "effective_batch_size"),
        wanted,
        f"does not multiply out: {stage.per_device_batch_size} per GPU × "
        f"{stage.gradient_accumulation_steps} accumulation steps × {gpus} GPUs = {product}; {fix}",
    )
