"""The built-in training: trains one stage from the job file to the final model."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.cost.stage import PRECOMPUTED_LATENTS
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.base.signals import StopSignal
from sm_train.entrypoints.distributed import backend as backends
from sm_train.entrypoints.distributed.object_exchange import all_gather
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    FINAL_MODEL,
    SAMPLER_FILE,
    SETTINGS_FILE,
)
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.index_location import removal_list
from sm_train.entrypoints.launcher.training_process import TrainingProcess, exit_now, run_job
from sm_train.entrypoints.models.component_files import (
    LocalComponents,
    frozen_identities,
    identity_differences,
)
from sm_train.entrypoints.models.model_card import TrainingRecord, bundle_variables
from sm_train.entrypoints.monitoring.heartbeat import (
    HeartbeatWriter,
    Phase,
    events_file,
    heartbeat_folder,
)
from sm_train.entrypoints.records.upload_notes import UPLOAD_NOTES
from sm_train.entrypoints.training.gpu_settings import configure_kernels, set_allocator

if TYPE_CHECKING:
    from accelerate import Accelerator
    from sm_train.entrypoints.base.signals import StopSignal
    from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointInfo
    from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog
    from sm_train.entrypoints.data_loading.webdataset_reader import ShardStream
    from sm_train.entrypoints.distributed.backend import BackendChoice
    from sm_train.entrypoints.job_interface.job_config import JobConfig
    from sm_train.entrypoints.models.builder import ModelComponents
    from sm_train.entrypoints.models.model_card import TrainingRecord
    from sm_train.entrypoints.training.evaluator import ValidationSet
    from sm_train.entrypoints.training.trainer import Trainer


def main(arguments: list[str] | None = None) -> None:
    """Train the stage; exit with 0 when done or stopped, else with 1."""
    exit_code = run_job(_train, arguments, prepare=set_allocator)
    # Exit without a clean shutdown: after a failure peers may wait in a collective forever, and
    # destroying Gloo's process group can deadlock. It holds the GIL while it waits for its own
    # thread, which may wait for the GIL to release the last barrier (seen with PyTorch 2.13).
    exit_now(exit_code)


def _train(process: TrainingProcess) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from sm_train.entrypoints.data_loading.shard_channels import as_of_checkpoint, job_channels
    from sm_train.entrypoints.distributed.fsdp import ddp_options
    from sm_train.entrypoints.models.builder import build_components, require_unchanged
    from sm_train.entrypoints.models.image_sampling import COMPONENTS_FOLDER
    from sm_train.entrypoints.models.model_folders import save_components
    from sm_train.entrypoints.training.trainer import Trainer

    config, paths, writer = process.config, process.paths, process.heartbeat
    resources = ResourceConfig.read(paths)
    stop = StopSignal(paths.stop_request)
    choice = backends.decide(
        nodes=len(resources.hosts),
        backend=config.backend,
        instance_type=resources.instance_type,
    )
    backend = backends.join(choice, process.end_hanging_job)
    configure_kernels(config)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.training.bf16 else "no",
        kwargs_handlers=[ddp_options()],
    )
    recent_events = events_file(heartbeat_folder(), accelerator.local_process_index)
    events = EventLog(
        node=resources.node_rank,
        rank=accelerator.process_index,
        recent_events_file=recent_events,
        subscriber=process.trackers.send,
    )
    if backend.warning and accelerator.is_main_process:
        events.warn("smddp-unavailable", backend.warning)
    data_rank = _data_rank(accelerator, resources)
    synthetic = None
    if config.data.synthetic_samples:
        synthetic = _generate_shards(config, paths, accelerator, resources, events)
    shards = _training_shards(config, paths, synthetic, data_rank, events)
    validation = _validation_set(accelerator, paths, data_rank, events)
    # The start before the first step may take long. Entering the phase again grants each part of
    # it the full timeout.
    writer.enter(Phase.START, 0)
    if accelerator.is_local_main_process:
        require_unchanged(_existing(paths.channel("model")))
    set_seed(config.training.seed)
    components = build_components(
        config.model,
        config.stage.resolution,
        components=_existing(paths.channel("model")),
        previous=_existing(paths.channel("previous")),
        prediction_type=config.stage.prediction_type,
    )
    writer.enter(Phase.START, 0)
    # Before the components are written: those of another target would describe, from then on, the
    # checkpoints that exist.
    checkpoint = _find_checkpoint(config, components, paths, data_rank, accelerator, events)
    config = _keep_color(config, checkpoint, paths, events, is_main=accelerator.is_main_process)
    if checkpoint is not None and synthetic is None:
        state = (checkpoint.folder / SAMPLER_FILE).read_bytes()
        channels = job_channels(config.data, paths)
        shards = as_of_checkpoint(shards, channels, config.data, state, all_gather)
    if accelerator.is_main_process:
        source = _existing(paths.channel("model"))
        record = _training_record(config, components, shards, source, paths)
        folder = paths.checkpoints / COMPONENTS_FOLDER
        save_components(components, source, record, folder, config.training.seed)
    trainer = Trainer(
        config,
        components,
        accelerator,
        paths,
        events,
        shards,
        data_rank,
        validation=validation,
        checkpoint=checkpoint,
    )
    if accelerator.is_main_process:
        _log_start(trainer, backend, resources)
    _run(trainer, writer, stop)
    accelerator.wait_for_everyone()


def _find_checkpoint(
    config: JobConfig,
    components: ModelComponents,
    paths: SageMakerPaths,
    data_rank: DataRank,
    accelerator: Accelerator,
    events: EventLog,
) -> CheckpointInfo | None:
    """Return the checkpoint to resume from, the same on all nodes, and whole on each.

    What the run file has changed since, or since the previous stage, is logged.

    Raises:
        CheckpointError: the checkpoint or the previous stage was trained for another target.
    """
    from sm_train.entrypoints.checkpoints.async_checkpointer import CheckpointRank
    from sm_train.entrypoints.checkpoints.resume_point import Nodes, find_latest
    from sm_train.entrypoints.training import run_settings

    rank = CheckpointRank.of(data_rank, accelerator.process_index, accelerator.num_processes)
    nodes = Nodes(rank, all_gather, accelerator.device)
    checkpoint = find_latest(paths.checkpoints, nodes, events.warn)
    target = run_settings.target(config, components)
    previous = paths.channel("previous")
    changes: list[str] = []
    if checkpoint is not None:
        run_settings.require_same_target(checkpoint.folder, target)
    elif previous.is_dir():
        changes = run_settings.target_changes(previous, target, config.stage)
    _check_components(config, components, checkpoint, previous, accelerator, events)
    if changes and accelerator.is_main_process:
        message = f"since the previous stage: {'; '.join(changes)}"
        events.warn("target-changed", message)
    return checkpoint


def _keep_color(
    config: JobConfig,
    checkpoint: CheckpointInfo | None,
    paths: SageMakerPaths,
    events: EventLog,
    *,
    is_main: bool,
) -> JobConfig:
    """Return the job with the color policy that its run began with; another one is logged."""
    from sm_train.entrypoints.training import run_settings

    folder = checkpoint.folder if checkpoint is not None else paths.channel("previous")
    if not folder.is_dir():
        return config
    kept = run_settings.with_kept_color(config, folder)
    if kept.data.color != config.data.color and is_main:
        message = (
            f"the run began with {kept.data.color} and keeps it; the run file's "
            f"{config.data.color} applies to a run under another name"
        )
        events.warn("color-policy-kept", message)
    return kept


def _check_components(
    config: JobConfig,
    components: ModelComponents,
    checkpoint: CheckpointInfo | None,
    previous: Path,
    accelerator: Accelerator,
    events: EventLog,
) -> None:
    """Refuse frozen components that hold other tensors than those the weights were trained with.

    Raises:
        CheckpointError: they do, and the run file does not accept that.
    """
    from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
    from sm_train.entrypoints.training import run_settings

    folder = checkpoint.folder if checkpoint is not None else previous
    if not folder.is_dir():
        return
    stored = run_settings.read_settings(folder)["components"]
    differences = identity_differences(stored, components.identities)
    if not differences:
        return
    if not config.model.accept_components:
        raise CheckpointError(
            f"{folder.name}: trained with other components: {'; '.join(differences)}; restore "
            "model.components, or give --accept-components to continue with these"
        )
    if accelerator.is_main_process:
        events.warn("components-changed", f"other components: {'; '.join(differences)}")


def _training_record(
    config: JobConfig,
    components: ModelComponents,
    shards: ShardCatalog | ShardStream,
    source: Path | None,
    paths: SageMakerPaths,
) -> TrainingRecord:
    """Return what the final model's card says about this job."""
    from sm_train.entrypoints.models.component_files import read_manifest

    bundle, commit = bundle_variables()
    manifest = None if source is None else read_manifest(LocalComponents(source))
    starts_from_source = components.network_init.folder is not None
    return TrainingRecord(
        run=config.run,
        stage=config.stage.name,
        preset=config.model.preset or "",
        prediction_type=components.objective.prediction_type,
        resolution=config.stage.resolution,
        license=config.license,
        data_digest=shards.digest,
        data_digest_covers=shards.digest_covers,
        bundle=bundle,
        commit=commit,
        prompts=config.evaluation.prompts,
        base_model=manifest.repository if manifest and starts_from_source else None,
        data=_data_facts(config, paths),
        components=components.identities,
    )


def _data_facts(config: JobConfig, paths: SageMakerPaths) -> dict[str, list[tuple[str, str]]]:
    """Return what the index of each channel says of the images that the job trains on."""
    from sm_train.entrypoints.data_loading.shard_channels import job_channels
    from sm_train.entrypoints.lineage.data_facts import data_facts, fact_rows
    from sm_train.entrypoints.shards.removed_samples import read_list_file
    from sm_train.entrypoints.shards.shard_index import ShardIndex

    found = {}
    for channel in () if config.data.synthetic_samples else job_channels(config.data, paths):
        if channel.index is not None:
            removals = read_list_file(Path(removal_list(str(channel.index))))
            facts = data_facts(ShardIndex(channel.index), removals, where=channel.where)
            found[channel.name] = fact_rows(facts)
    return found


def _generate_shards(
    config: JobConfig,
    paths: SageMakerPaths,
    accelerator: Accelerator,
    resources: ResourceConfig,
    events: EventLog,
) -> Path:
    """Generate synthetic shards on every node; return their folder."""
    from sm_train.entrypoints.training.synthetic_shards import write_synthetic_shards

    folder, samples = paths.base / "synthetic", config.data.synthetic_samples
    if accelerator.is_local_main_process:
        write_synthetic_shards(folder, resources.node_rank, samples, config.stage.resolution)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        message = f"trains on {samples:,} synthetic images on each node: a measurement only"
        events.warn("synthetic-data", message)
    return folder


def _data_rank(accelerator: Accelerator, resources: ResourceConfig) -> DataRank:
    from sm_train.entrypoints.data_loading.shard_catalog import DataRank

    local_world_size = accelerator.num_processes // len(resources.hosts)
    return DataRank(
        resources.hosts, resources.node_rank, accelerator.local_process_index, local_world_size
    )


def _training_shards(
    config: JobConfig,
    paths: SageMakerPaths,
    synthetic: Path | None,
    data_rank: DataRank,
    events: EventLog,
) -> ShardCatalog | ShardStream:
    """Return the training data, as the reader of the run file needs it.

    That is the folder of ``synthetic`` shards, if there is one.
    """
    from sm_train.entrypoints.data_loading.shard_channels import (
        ShardChannel,
        job_channels,
        list_channels,
    )

    def check(channel: ShardChannel, catalog: ShardCatalog) -> ShardCatalog:
        is_first_rank = data_rank.node_rank == data_rank.local_rank == 0
        if channel.index is None and synthetic is None and is_first_rank:
            message = (
                f"the shards have no index: reading their headers took {catalog.seconds:.1f} s, at "
                "every start; `sm-train index` avoids that"
            )
            events.warn("no-index", message)
        return _checked(catalog, paths, events)

    data, channels = config.data, job_channels(config.data, paths)
    if synthetic is not None:
        data = replace(data, sources=())
        channels = [ShardChannel("train", synthetic, None, None, channels[0].scans)]
    return list_channels(channels, data, data_rank, all_gather, check)


def _validation_set(
    accelerator: Accelerator, paths: SageMakerPaths, data_rank: DataRank, events: EventLog
) -> ValidationSet | None:
    """Return the validation channel, if there is one, partitioned over all ranks."""
    from sm_train.entrypoints.data_loading.shard_catalog import DataRank
    from sm_train.entrypoints.data_loading.shard_channels import job_channel, list_channel
    from sm_train.entrypoints.training.evaluator import ValidationSet

    channel = job_channel("validation", paths)
    if not channel.folder.is_dir():
        return None
    catalog = _checked(list_channel(channel, data_rank, all_gather), paths, events)
    # Every instance has a copy of the channel, so all ranks count as those of a single node.
    single_node = DataRank(("all",), 0, accelerator.process_index, accelerator.num_processes)
    return ValidationSet(catalog, single_node)


def _checked(catalog: ShardCatalog, paths: SageMakerPaths, events: EventLog) -> ShardCatalog:
    """Warn about damaged shards, and return the catalog to use."""
    for shard, reason in catalog.damage:
        events.warn("shard-damaged", f"{shard}: {reason}")
    return _ignore_mismatched_latents(catalog, paths, events)


def _ignore_mismatched_latents(
    catalog: ShardCatalog, paths: SageMakerPaths, events: EventLog
) -> ShardCatalog:
    """Ignore precomputed latents that another autoencoder or text encoder made."""

    latents = catalog.options.get("latents")
    if not latents:
        return catalog
    folder = _existing(paths.channel("model"))
    current = {} if folder is None else frozen_identities(LocalComponents(folder))
    differences = identity_differences(latents["model"], current)
    if not differences:
        return catalog
    message = (
        "the shards carry latents of another model than model.components, and images are decoded "
        f"instead, in every epoch: {differences[0]}; `sm-train pack --latents` makes them again"
    )
    events.warn("latents-model-mismatch", message)
    return replace(catalog, options={**catalog.options, "latents": None})


def _existing(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


def _log_start(trainer: Trainer, backend: BackendChoice, resources: ResourceConfig) -> None:
    """Log the run's actual configuration and warnings about it."""

    config, events, plan = trainer.config, trainer.events, trainer.plan
    stage, world_size = config.stage, trainer.accelerator.num_processes
    prepared = f"{'compiled' if plan.compile else 'not compiled'} ({plan.compile_reason})"
    if plan.text_encoders != "replicated":
        prepared += f", text encoders {plan.text_encoders} ({plan.text_encoders_reason})"
    parameters = sum(parameter.numel() for parameter in trainer.state.parameters)
    # Of the network that an adapter extends.
    frozen = sum(
        parameter.numel()
        for parameter in trainer.state.module.parameters()
        if not parameter.requires_grad
    )
    events.write(
        "start",
        f"{config.run} {stage.name}: {parameters:,} parameters, {world_size} processes on "
        f"{len(resources.hosts)} nodes, {backend.backend} ({backend.reason}), {prepared}",
        run=config.run,
        stage=stage.name,
        resolution=stage.resolution,
        world_size=world_size,
        nodes=len(resources.hosts),
        instance_type=resources.instance_type,
        accelerator=backends.gpu_name(),
        per_device_batch_size=stage.per_device_batch_size,
        gradient_accumulation_steps=stage.gradient_accumulation_steps,
        effective_batch_size=trainer.metrics.effective_batch_size,
        max_steps=stage.max_steps,
        parameters=parameters,
        frozen_parameters=frozen,
        backend=backend.backend,
        backend_reason=backend.reason,
        precision=config.training.precision,
        reduce_dtype=config.training.reduce_dtype,
        resumed_from_step=trainer.resumed_from,
        **asdict(plan),
        input_kind="images" if trainer.loader.precomputed is None else PRECOMPUTED_LATENTS,
    )
    reader = trainer.loader.reader
    if reader.order_note and world_size > 1:
        events.warn(
            "order-depends-on-ranks",
            "another number of ranks would train on the samples in another order: "
            f"{reader.order_note}",
        )
    if reader.resume_warning:
        events.warn(reader.resume_code, reader.resume_warning)
    for name in trainer.components.random_frozen:
        message = (
            f"{name} has RANDOM weights and is not trained: set model.components, or the images "
            "will be meaningless"
        )
        events.write(
            "warning", f"WARNING: {message}", code="random-init-component", message=message
        )


def _run(trainer: Trainer, writer: HeartbeatWriter, stop: StopSignal) -> None:
    is_main = trainer.accelerator.is_main_process
    compilation = trainer.metrics.compilation
    with compilation.watching(writer) if trainer.plan.compile else nullcontext():
        result = trainer.run(writer, stop)
    writer.enter(Phase.FINISH, trainer.state.step)
    if result.reason == "done" and trainer.config.checkpoint.save:
        _save_final_model(trainer, is_main=is_main)
    else:
        stop.confirm()
    if is_main:
        trainer.log_end(result)


def _save_final_model(trainer: Trainer, *, is_main: bool) -> None:
    """Save the model twice: for SageMaker's model output, and for the next stage.

    SageMaker packs the model folder under a key that contains the job's name. The next stage reads
    the copy below the checkpoints' prefix, which is known before the job has a name.
    """
    from sm_train.entrypoints.models.image_sampling import COMPONENTS_FOLDER, latest_grid
    from sm_train.entrypoints.models.model_folders import save_model, share_model

    paths, weights = trainer.paths, trainer.final_weights()
    if not is_main:
        # Gathering sharded weights is a collective: all ranks iterate.
        for _ in weights.tensors:
            pass
        return
    components = paths.checkpoints / COMPONENTS_FOLDER
    grid = latest_grid(paths.checkpoints, trainer.state.step)
    save_model(components, weights, paths.model, grid=grid)
    final = paths.checkpoints / FINAL_MODEL
    share_model(components, paths.model, final)
    write_atomic(final / SETTINGS_FILE, trainer.checkpoints.settings_file())
    if (doctor_results := paths.checkpoints / "doctor").is_dir():
        # The next stage's doctor compares with the results on these instances.
        ignore = shutil.ignore_patterns(UPLOAD_NOTES)
        shutil.copytree(doctor_results, final / "doctor", ignore=ignore, dirs_exist_ok=True)
