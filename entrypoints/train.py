"""The job's main function: from the run document to a final model, whatever starts it.

torchrun, smddprun and ``accelerate launch`` all start one process for each GPU with
``train.py --stage NAME`` from the unpacked bundle.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JOB_FILE, JobConfig, read_job_config
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.distributed.backend import adopt_mpi_variables
from sm_train.entrypoints.monitoring.heartbeat import (
    HeartbeatWriter,
    Phase,
    events_file,
    heartbeat_folder,
)
from sm_train.entrypoints.monitoring.start import heartbeat

if TYPE_CHECKING:
    from accelerate import Accelerator
    from sm_train.entrypoints.common.signals import StopSignal
    from sm_train.entrypoints.data.shard_catalog import DataRank, ShardCatalog
    from sm_train.entrypoints.distributed.backend import BackendChoice
    from sm_train.entrypoints.training.evaluator import ValidationSet
    from sm_train.entrypoints.training.trainer import Trainer


def main(arguments: list[str] | None = None) -> None:
    """Train the stage; ends the process with 0 when done or stopped, else with 1.

    A failure leaves its cause where SageMaker looks for it, and as an event.
    """
    directories = SageMakerPaths.from_environment()
    try:
        options = _options(arguments)
        settings = read_job_config(options.document, options.stage)
        adopt_mpi_variables()
        _examine(settings, directories, options)
        if not options.doctor_only:
            with heartbeat(options.document, options.stage) as pulse:
                _train(settings, directories, pulse)
    except Exception as error:
        _report(error, directories)
        # A peer may wait in a collective for ever: leave without asking it.
        _leave(1)
    # Gloo's process group, when it is destroyed, waits with the GIL held for its own thread, which
    # may be waiting for the GIL to forget the last barrier (seen with PyTorch 2.13): don't.
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End the process as it is."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one stage of a run.", allow_abbrev=False)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--document", type=Path, default=Path(sys.argv[0]).parent / JOB_FILE)
    # A hyperparameter has a value, and the container's toolkit writes it as Python would.
    parser.add_argument("--doctor-only", choices=("true", "True"))
    # The platform hands its own hyperparameters on as further arguments.
    return parser.parse_known_args(arguments)[0]


def _examine(settings: JobConfig, directories: SageMakerPaths, options: argparse.Namespace) -> None:
    """Let the doctor look at the cluster, if the run file says so or nothing else is wanted.

    Raises:
        UnfitClusterError: the run file says not to train on such a cluster.
    """
    from sm_train.entrypoints.doctor.start import examine, mode

    hosts = ResourceConfig.read(directories)
    wanted = mode(settings, hosts)
    if wanted != "off" or options.doctor_only:
        # Who only wants to know reads the result.
        fail = wanted == "fail" and not options.doctor_only
        examine(settings, options.document, fail=fail)


def _train(settings: JobConfig, directories: SageMakerPaths, pulse: HeartbeatWriter) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, set_seed
    from sm_train.entrypoints.common.signals import StopSignal
    from sm_train.entrypoints.distributed.backend import decide, join
    from sm_train.entrypoints.models.builder import build
    from sm_train.entrypoints.models.export import save_frame
    from sm_train.entrypoints.models.sampling import FRAME
    from sm_train.entrypoints.training.trainer import Trainer

    hosts = ResourceConfig.read(directories)
    choice = decide(
        nodes=len(hosts.hosts),
        backend=settings.backend,
        instance_type=hosts.instance_type,
    )
    join(choice)
    stop = StopSignal()
    accelerator = Accelerator(
        mixed_precision="bf16" if settings.training.precision == "bf16" else "no",
        # Every step runs through the same graph: all that is trained, whatever the batch.
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
        ],
    )
    last_events = events_file(heartbeat_folder(), accelerator.local_process_index)
    events = EventLog(
        node=hosts.node_rank, rank=accelerator.process_index, recent_events_file=last_events
    )
    seat = _seat(accelerator, hosts)
    index = next(iter(sorted(directories.channel("index").rglob("*.parquet"))), None)
    catalogue = _survey(directories, "train", index, seat, events)
    if index is None and (seat.node_rank, seat.local_rank) == (0, 0):
        message = (
            f"the shards have no index: reading their headers took {catalogue.seconds:.1f} s, at "
            "every start; `sm-train index` spares that"
        )
        events.warn("no-index", message)
    held_out = _held_out(accelerator, directories, seat, events)
    # What comes before the first step may take long; each part of it may take as long as allowed.
    pulse.enter(Phase.START, 0)
    set_seed(settings.training.seed)
    parts = build(
        settings.model,
        settings.stage.resolution,
        components=_existing(directories.channel("model")),
        previous=_existing(directories.channel("previous")),
    )
    pulse.enter(Phase.START, 0)
    if accelerator.is_main_process:
        save_frame(parts, directories.checkpoints / FRAME)
    trainer = Trainer(settings, parts, accelerator, directories, events, catalogue, seat, held_out)
    if accelerator.is_main_process:
        _announce(trainer, choice, hosts)
    _run(trainer, pulse, stop)
    accelerator.wait_for_everyone()


def _seat(accelerator: Accelerator, hosts: ResourceConfig) -> DataRank:
    from sm_train.entrypoints.data.shard_catalog import DataRank

    processes = accelerator.num_processes // len(hosts.hosts)
    return DataRank(hosts.hosts, hosts.node_rank, accelerator.local_process_index, processes)


def _held_out(
    accelerator: Accelerator, directories: SageMakerPaths, seat: DataRank, events: EventLog
) -> ValidationSet | None:
    """The validation channel, which every instance has whole: all processes share it out."""
    from sm_train.entrypoints.data.shard_catalog import DataRank
    from sm_train.entrypoints.training.evaluator import ValidationSet

    if not directories.channel("validation").is_dir():
        return None
    catalogue = _survey(directories, "validation", None, seat, events)
    together = DataRank(("all",), 0, accelerator.process_index, accelerator.num_processes)
    return ValidationSet(catalogue, together)


def _survey(
    directories: SageMakerPaths, channel: str, index: Path | None, seat: DataRank, events: EventLog
) -> ShardCatalog:
    """Agree on a channel's shards before the first step, and say what is wrong with them."""
    from accelerate.utils import gather_object
    from sm_train.entrypoints.data.shard_catalog import build_catalog

    catalogue = build_catalog(
        directories.channel(channel),
        index,
        seat,
        lambda value: gather_object([value]),
        directories.base / "walk" / channel,
    )
    for shard, line in catalogue.damage:
        message = f"{shard}: {line}"
        events.warn("shard-damaged", message)
    return _with_own_latents(catalogue, directories, events)


def _with_own_latents(
    catalogue: ShardCatalog, directories: SageMakerPaths, events: EventLog
) -> ShardCatalog:
    """Leave latents alone that another autoencoder or text encoder made."""
    from sm_train.entrypoints.models.components import components_digest

    latents = catalogue.options.get("latents")
    if not latents or latents["model"] == components_digest(directories.channel("model")):
        return catalogue
    message = (
        "the shards carry latents of another model than model.components; images are decoded "
        "instead, at every epoch"
    )
    events.warn("latents-model-mismatch", message)
    return replace(catalogue, options={**catalogue.options, "latents": None})


def _existing(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


def _announce(trainer: Trainer, choice: BackendChoice, hosts: ResourceConfig) -> None:
    """The run as it really is, and what about it is not as it should be."""
    settings, events = trainer.config, trainer.events
    stage, processes = settings.stage, trainer.accelerator.num_processes
    parameters = sum(one.numel() for one in trainer.state.parameters)
    events.write(
        "start",
        f"{settings.run} {stage.name}: {parameters:,} parameters, {processes} processes on "
        f"{len(hosts.hosts)} nodes, {choice.backend} ({choice.reason})",
        run=settings.run,
        stage=stage.name,
        resolution=stage.resolution,
        world_size=processes,
        nodes=len(hosts.hosts),
        instance_type=hosts.instance_type,
        per_device_batch_size=stage.per_device_batch_size,
        gradient_accumulation_steps=stage.gradient_accumulation_steps,
        effective_batch_size=trainer.metrics.effective_batch_size,
        max_steps=stage.max_steps,
        parameters=parameters,
        backend=choice.backend,
        backend_reason=choice.reason,
        precision=settings.training.precision,
        resumed_from_step=trainer.resumed_from,
        **asdict(trainer.plan),
        input_kind="images" if trainer.loader.precomputed is None else "precomputed latents",
    )
    if trainer.loader.resume_warning:
        events.warn("data-resharded", trainer.loader.resume_warning)
    for name in trainer.components.random_frozen:
        message = (
            f"{name} has RANDOM weights and is not trained: name model.components, or the images "
            "will mean nothing"
        )
        events.write(
            "warning", f"WARNING: {message}", code="random-init-component", message=message
        )


def _run(trainer: Trainer, pulse: HeartbeatWriter, stop: StopSignal) -> None:
    main = trainer.accelerator.is_main_process
    ended = trainer.run(pulse, stop)
    pulse.enter(Phase.FINISH, trainer.state.step)
    if ended.reason == "done":
        _save_final(trainer, main=main)
    if main:
        trainer.log_end(ended)


def _save_final(trainer: Trainer, *, main: bool) -> None:
    """The model, twice: SageMaker packs its model folder under a name with the job's; the next
    stage finds the copy under the checkpoints' prefix, which is known beforehand.
    """
    from sm_train.entrypoints.common.checkpoint_layout import FINAL_MODEL
    from sm_train.entrypoints.models.export import save_model
    from sm_train.entrypoints.models.sampling import FRAME

    directories, weights = trainer.paths, trainer.final_weights()
    if not main:
        # Split weights are put together by all processes.
        for _ in weights:
            pass
        return
    save_model(directories.checkpoints / FRAME, trainer.components, weights, directories.model)
    final = directories.checkpoints / FINAL_MODEL
    shutil.copytree(directories.model, final, dirs_exist_ok=True)
    if (examined := directories.checkpoints / "doctor").is_dir():
        # What is known of the machines goes with the model to the next stage.
        shutil.copytree(
            examined, directories.checkpoints / FINAL_MODEL / "doctor", dirs_exist_ok=True
        )


def _report(error: Exception, directories: SageMakerPaths) -> None:
    """Say the cause as an event and in the failure file; the first process to fail writes it."""
    cause = f"{type(error).__name__}: {error}"
    hosts = ResourceConfig.read(directories)
    rank = int(os.environ.get("RANK", "0"))
    EventLog(node=hosts.node_rank, rank=rank).write(
        "error", f"rank {rank} failed: {cause}", code=type(error).__name__, message=cause
    )
    traceback.print_exc()
    directories.failure.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), directories.failure.open("x") as file:
        file.write(f"rank {rank}: {cause}\n\n{traceback.format_exc()}")
