"""The parts of gpu.py, in the order of their value: what only a GPU exercises.

=============  ==================================================================================
families       loss and gradients of every model family: the GPU against the CPU, in fp32 and bf16
sync           no step between two log intervals waits for the GPU (``set_sync_debug_mode``)
sd2            images/s, MFU, peak memory against the plan, and speed against ``cost``
snapshot       a checkpoint that is saved during training equals a copy of its step's state
resume         a job that is killed and started again ends bit for bit like one that is not
mmdit          as ``sd2``, for ``mmdit-2b``
mmdit-compile  as ``mmdit``, with its blocks compiled
fsdp           ``fully_shard`` with NCCL: an evaluation does not change the next step's loss
nan            a step without a finite gradient changes no weight and no optimizer state
rollback       several such steps in a row roll the job back to its last checkpoint
optimizers     each of PyTorch's optimizers resumes bit for bit
adamw8bit      so does that of bitsandbytes
loader         the share of time for which the GPU waits for decoded images
node           NVML's figures of the GPU, and the doctor on one GPU
sd2-compile    as ``sd2``, with its blocks compiled
mmdit-fp8      as ``mmdit-compile``, with linear layers in fp8
encoders       as ``mmdit``, with all encoders in the job: on the GPU, or on the CPU between uses
=============  ==================================================================================

A part gets a :class:`PartRun` and returns the line that is printed. It raises if it fails.
"""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import webdataset
from accelerate import Accelerator

# diffusers and transformers import their classes when they are named; a fork inherits them.
from diffusers import AutoencoderKL, SD3Transformer2DModel, UNet2DConditionModel  # noqa: F401
from photos import photo
from sm_train.cost.accelerators import accelerator as data_sheet
from sm_train.cost.network import gpu_network
from sm_train.cost.speed_model import (
    BF16_PRECISIONS,
    StepWork,
    TextEncoderPlacement,
    images_per_second,
)
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, load_into
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    is_shard_file,
    step_folder_name,
)
from sm_train.entrypoints.job_interface.events import PREFIX
from sm_train.entrypoints.job_interface.job_config import JobConfig, Precision
from sm_train.entrypoints.models.builder import ModelComponents, build_components
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter
from sm_train.entrypoints.monitoring.node_metrics import NodeCounters, event_fields
from sm_train.entrypoints.planning.memory import ModelPlan, plan_preset
from sm_train.entrypoints.planning.mfu import PEAK_FLOPS, MfuMeter
from sm_train.entrypoints.training import gpu_settings, train
from sm_train.entrypoints.training.parallelize import ParallelPlan
from sm_train.entrypoints.training.step_metrics import StepMetricsWindow
from sm_train.entrypoints.training.trainer import Trainer
from sm_train.entrypoints.training.training_loss import TrainingLoss
from torch import Tensor
from training_setup import (
    configure,
    make_trainer,
    synthetic_batch,
    with_small_encoders,
    write_document,
    write_shards,
)
from transformers import CLIPTextModel, T5EncoderModel  # noqa: F401

FAMILIES = ("tiny-sd2", "tiny-sdxl", "tiny-dit", "tiny-mmdit", "tiny-pixels", "digits")

FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 5e-2
"""Largest norm of a difference of gradients, relative to their norm: the order of sums differs, and
bf16 keeps 8 bits."""

PUBLISHED = {("sd2", False): 127.0, ("sd2", True): 385.3 / 8}
"""Images/s of one H100 at 512 px, by preset and whether encoders run in the job: MLPerf Training
4.0, NVIDIA, and awsome-distributed-training, as listed in benchmarks/data/speeds.csv."""


DATA_SHEETS = {
    "A100": "A100-SXM4-80GB",
    "H100": "H100-SXM5-80GB",
    "H200": "H200-SXM-141GB",
    "B200": "B200-179GiB",
}
"""Part of a GPU's name → its row of cost/data/accelerators.csv."""


class NotInstalledError(Exception):
    """A part needs a package that is not installed; the message names it."""


@dataclass
class PartRun:
    """How a part runs: on which device, with tiny networks (``quick``), below which folder.

    ``optional`` is a folder of packages that start CUDA when they are imported.
    ``report`` sends figures to the runner at once, so that a part that is ended keeps them.
    """

    device: str
    quick: bool
    folder: Path
    optional: Path | None = None
    report: Callable[..., None] = lambda **figures: None

    def accelerator(self, precision: str = "bf16") -> Accelerator:
        mixed = "bf16" if precision in BF16_PRECISIONS else "no"
        return Accelerator(mixed_precision=mixed, cpu=self.device == "cpu")

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Part:
    """A part with its limit in seconds."""

    name: str
    run: Callable[[PartRun], str]
    limit: float


# ---------------------------------------------------------------------- arithmetic


def families(run: PartRun) -> str:
    """Compare loss and gradients of one batch with those of the CPU in fp32."""
    worst = {"fp32": 0.0, "bf16": 0.0}
    for preset in FAMILIES:
        cpu = PartRun("cpu", run.quick, run.folder / f"{preset}-cpu")
        config = configure(preset, 32, 4, precision="fp32")
        expected_loss, expected, state, batch = _loss_and_gradients(cpu, config, None, None)
        norm = torch.linalg.vector_norm(expected)
        assert norm > 0, f"{preset}: no gradient"
        for precision, tolerance in (("fp32", FP32_TOLERANCE), ("bf16", BF16_TOLERANCE)):
            again = replace(run, folder=run.folder / f"{preset}-{precision}")
            config = configure(preset, 32, 4, precision=precision)
            loss, gradients, _, _ = _loss_and_gradients(again, config, state, batch)
            difference = float(torch.linalg.vector_norm(gradients - expected) / norm)
            run.report(
                **{f"{preset} {precision}": {"gradients": difference, "loss": loss - expected_loss}}
            )
            worst[precision] = max(worst[precision], difference)
            assert difference <= tolerance, (
                f"{preset} in {precision}: gradients by {difference:.1e}"
            )
    return (
        f"{len(FAMILIES)} presets: gradients differ by {worst['fp32']:.0e} in fp32, "
        f"{worst['bf16']:.0e} in bf16"
    )


def _loss_and_gradients(
    run: PartRun, config: JobConfig, state: dict[str, Tensor] | None, batch: Batch | None
) -> tuple[float, Tensor, dict[str, Tensor], Batch]:
    """Return loss, gradients (one vector), weights and batch; ``state`` None makes new weights."""
    _reset_accelerator()
    torch.manual_seed(0)  # of the frozen components
    gpu_settings.configure_kernels(config)
    trainer = make_trainer(run.accelerator(config.training.precision), run.folder, config)
    module = trainer.state.module
    if state is None:
        # Layers that start at zero would hide the gradients of all layers before them.
        state = {
            name: value + 0.02 * torch.randn_like(value)
            for name, value in module.state_dict().items()
        }
    module.load_state_dict(state)
    batch = batch or synthetic_batch(trainer, 32, 4, online=True)
    with trainer.autocast():
        target, text = trainer.model_inputs.prepare(batch)
        prediction = trainer.model(target.noisy, target.timesteps, *text)
        loss = trainer._loss.mean(prediction, target)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [weight.grad for weight in trainer.state.parameters if weight.grad is not None]
    return (
        loss.item(),
        torch.cat([gradient.float().flatten().cpu() for gradient in gradients]),
        {name: value.cpu() for name, value in state.items()},
        batch,
    )


@contextmanager
def _synchronization_forbidden(device: str) -> Iterator[None]:
    """Raise where the CPU waits for the GPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sync(run: PartRun) -> str:
    """Take steps from the loader, with precomputed text and with encoders, without any wait."""
    steps = 5
    presets = ("tiny-sd2", "tiny-mmdit", "tiny-dit", "tiny-sdxl")
    for preset in presets:
        folder = run.folder / preset
        trainer = make_trainer(run.accelerator(), folder, configure(preset, 32, 4))
        steady = _Steps(run, trainer, iter(trainer.loader))
        steady.take(3)  # allocates the optimizer's state
        with _synchronization_forbidden(run.device):
            steady.take(steps)
            trainer.state.background.join()
        run.report(**{preset: "no wait"})
        _reset_accelerator()
    if run.device == "cpu":
        return f"{steps} steps of {len(presets)} presets ran; a CPU has no such check"
    return f"{steps} steps of {len(presets)} presets without a wait for the GPU"


def _reset_accelerator() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


class _Steps:
    """Takes optimizer steps of a trainer."""

    def __init__(self, run: PartRun, trainer: Trainer, batches: Iterator[Batch]) -> None:
        self.trainer, self._batches = trainer, batches
        self._window = StepMetricsWindow(trainer.device)
        self._heartbeat = HeartbeatWriter(run.folder / "heartbeat-0", rank=0, local_rank=0)
        self._busy = trainer._create_busy_timer(self._heartbeat)

    def take(self, count: int) -> None:
        for _ in range(count):
            self.trainer._train_step(self._batches, self._window, self._heartbeat, self._busy)


# ---------------------------------------------------------------------- throughput


@dataclass(frozen=True)
class _Throughput:
    """One measurement: a preset at 512 px in bf16, or a tiny one with ``quick``."""

    preset: str
    batch: int
    online: bool = False
    checkpointing: bool = False
    compile: bool = False
    resolution: int = 512
    precision: Precision = "bf16"
    text_encoders: TextEncoderPlacement = "replicated"

    @property
    def label(self) -> str:
        kind = "encoders in the job" if self.online else "precomputed"
        kind += " on the CPU between uses" if self.text_encoders == "cpu" else ""
        extra = ", activation checkpointing" if self.checkpointing else ""
        extra += ", compiled" if self.compile else ""
        extra += ", fp8" if self.precision == "fp8" else ""
        return f"batch {self.batch}, {kind}{extra}"


def _measure_throughput(run: PartRun, what: _Throughput) -> str:
    """Measure steady steps; report images/s, MFU, memory and the ratio to the prediction."""
    _reset_accelerator()
    torch.cuda.empty_cache()
    if run.quick:
        tiny = {"sd2": "tiny-sd2", "mmdit-2b": "tiny-mmdit"}[what.preset]
        what = replace(what, preset=tiny, batch=2, resolution=32)
    content = None if what.online else with_small_encoders(what.preset)
    config = configure(
        what.preset,
        what.resolution,
        what.batch,
        precision=what.precision,
        content=content,
        compile=what.compile,
        text_encoders=what.text_encoders,
    )
    stage = replace(config.stage, activation_checkpointing=what.checkpointing)
    config = replace(config, stage=stage)
    gpu_settings.configure_kernels(config)
    began = time.perf_counter()
    folder = run.folder / what.label.replace(" ", "-")
    components = _build_on(torch.device(run.device), config)
    trainer = make_trainer(run.accelerator(what.precision), folder, config, components)
    batch = synthetic_batch(trainer, what.resolution, what.batch, online=what.online)
    batch = _pinned(batch) if run.device == "cuda" else batch
    steps = _Steps(run, trainer, cycle([batch]))
    run.synchronize()
    built = time.perf_counter()
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps.take(3)
    run.synchronize()
    warm = time.perf_counter()
    figures: dict[str, Any] = {"build_seconds": built - began, "warmup_seconds": warm - built}
    if run.device == "cuda":
        # While cuDNN measures its algorithms, it takes whatever memory is free.
        figures["warmup_peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    count = 2 if run.quick else 12
    steps.take(count)
    run.synchronize()
    images = count * what.batch / (time.perf_counter() - warm)
    figures["images_per_second"] = images
    plan = plan_preset(what.preset, what.resolution, precision="bf16")
    words = [f"{images:.1f} images/s"]
    if run.device == "cuda":
        words += _gpu_figures(what, plan, trainer, images, figures)
    run.report(**{what.label: figures})
    if run.device == "cuda":
        figures |= _kernel_times(steps)
        run.report(**{what.label: figures})
        words.append(f"GPU busy {figures['gpu_busy']:.0%}")
    return f"{what.label}: {', '.join(words)}"


def _build_on(device: torch.device, config: JobConfig) -> ModelComponents:
    """Return a preset's components with random weights made on ``device``.

    A CPU would draw the 4.7 billion weights of a T5 XXL for minutes. They return to the CPU, from
    where the trainer places them, as after reading them from files.
    """
    with device:
        components = build_components(
            config.model, config.stage.resolution, components=None, previous=None
        )
    for module in components.frozen_modules():
        if config.training.bf16 and module is not components.vae:
            module.to(torch.bfloat16)
        module.to("cpu")
    return components


KERNELS = {
    "copies": r"Memcpy|Memset",
    "attention": r"flash|fmha|attention|sdpa",
    "convolutions": r"conv|wgrad|dgrad|fprop|winograd|nchwToNhwc|nhwcToNchw",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas",
    "optimizer, EMA and norms of gradients": r"multi_tensor|foreach|adam",
    "normalizations": r"norm|Norm|RowwiseMoments|welford",
    "compiled": r"triton",
    "element-wise": r"elementwise|vectorized|reduce|cat|index|gather|fill",
}
"""Kind of kernel → pattern of its name; the first one counts."""


def _kernel_times(steps: _Steps, count: int = 3) -> dict[str, Any]:
    """Return how long the GPU ran kernels in steady steps, by kind, in milliseconds per step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        started = time.perf_counter()
        steps.take(count)
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    launches = 0
    for event in profiler.key_averages():
        milliseconds = event.device_time_total / 1e3 / count
        kind = next((kind for kind, part in KERNELS.items() if re.search(part, event.key)), "other")
        kinds[kind] += milliseconds
        names[event.key[:120]] += milliseconds
        launches += event.count
    return {
        "gpu_busy": sum(kinds.values()) / (1e3 * wall / count),
        "kernel_milliseconds": dict(kinds.most_common()),
        "longest_kernels": dict(names.most_common(15)),
        "kernels_per_step": launches // count,
        "step_milliseconds": 1e3 * wall / count,
    }


def _gpu_figures(
    what: _Throughput, plan: ModelPlan, trainer: Trainer, images: float, figures: dict[str, Any]
) -> list[str]:
    """Add what only a GPU has; return it in words."""
    name = torch.cuda.get_device_name()
    sheet = data_sheet(next(row for part, row in DATA_SHEETS.items() if part in name))
    peak = next(flops for part, flops in PEAK_FLOPS.items() if part in name)
    mfu = MfuMeter(plan.training_flops_per_image, peak).mfu(images, 1)
    frozen = sum(
        weight.untyped_storage().nbytes()
        for module in trainer.components.frozen_modules()
        for weight in module.parameters()
    )
    states = plan.state_bytes(ema=True).total
    activations = plan.activation_bytes(
        what.batch, checkpointing=what.checkpointing, text_encoders=what.text_encoders
    )
    planned = states + frozen + activations
    used = torch.cuda.max_memory_allocated()
    gpu = sheet.gpu(what.precision)
    assert gpu is not None
    work = StepWork(
        images=what.batch,
        passes=1,
        flops=plan.training_flops_per_image,
        activation_bytes=plan.kept_bytes,
        parameters=plan.parameters,
        activation_checkpointing=what.checkpointing,
        compiled=what.compile,
        encoder_flops=plan.encoder_flops_per_image if what.online else 0.0,
        text_encoders=what.text_encoders,
        text_encoder_bytes=plan.text_bytes if what.online else 0.0,
        precision=what.precision,
        fp8=plan.fp8 if what.precision == "fp8" else None,
    )
    predicted = images_per_second(work, gpu, gpu_network(1, 1, 0.0, sheet.link_gbytes))
    figures |= {
        "gpu": name,
        "mfu": mfu,
        "peak_bytes": used,
        "planned_bytes": planned,
        "planned_activation_bytes": activations,
        "predicted_images_per_second": predicted,
    }
    words = [
        f"MFU {mfu:.0%}",
        f"{used / 2**30:.1f} GiB of {planned / 2**30:.1f} planned",
        f"{images / predicted:.2f} × predicted",
    ]
    if published := PUBLISHED.get((what.preset, what.online)):
        words.append(f"{images / published:.2f} × {published:.0f} published")
    return words


def _pinned(batch: Batch) -> Batch:
    """Return the batch in page-locked memory, as the loader returns it."""
    tensors = {
        name: value.contiguous().pin_memory()
        for name in ("pixels", "noise", "moments", "text", "pooled", "sizes")
        if (value := getattr(batch, name)) is not None
    }
    return replace(batch, **tensors)


def _measure_all(run: PartRun, measurements: Sequence[_Throughput]) -> str:
    return "; ".join(_measure_throughput(run, measurement) for measurement in measurements)


def sd2(run: PartRun) -> str:
    return _measure_all(run, [_Throughput("sd2", 32), _Throughput("sd2", 32, online=True)])


def sd2_compile(run: PartRun) -> str:
    return _measure_all(run, [_Throughput("sd2", 32, compile=True)])


def mmdit(run: PartRun) -> str:
    return _measure_all(
        run, [_Throughput("mmdit-2b", 8), _Throughput("mmdit-2b", 32, checkpointing=True)]
    )


def encoders(run: PartRun) -> str:
    on_gpu = _Throughput("mmdit-2b", 32, online=True, checkpointing=True)
    return _measure_all(run, [replace(on_gpu, text_encoders="cpu"), on_gpu])


def mmdit_compile(run: PartRun) -> str:
    return _measure_all(
        run,
        [
            _Throughput("mmdit-2b", 8, compile=True),
            _Throughput("mmdit-2b", 32, compile=True, checkpointing=True),
        ],
    )


def mmdit_fp8(run: PartRun) -> str:
    if not run.optional or not (run.optional / "torchao").is_dir():
        raise NotInstalledError("torchao, below --optional")
    sys.path.append(str(run.optional))
    what = _Throughput("mmdit-2b", 32, compile=True, checkpointing=True, precision="fp8")
    return _measure_all(run, [what])


# ---------------------------------------------------------------------- checkpoints


def _copied_state(trainer: Trainer) -> dict[ShardSpec, Tensor]:
    """Return a copy of everything that a checkpoint of this step holds."""
    tensors = trainer.state.tensors()
    trainer.state.background.join()
    return {spec: shard.tensor.clone() for spec, shard in tensors.items()}


def snapshot(run: PartRun) -> str:
    """Compare a checkpoint with a copy of its step's state, while later steps change the state."""
    preset = "tiny-sd2" if run.quick else "sd2"
    resolution, batch_size = (32, 2) if run.quick else (256, 16)
    config = configure(preset, resolution, batch_size, content=with_small_encoders(preset))
    trainer = make_trainer(run.accelerator(), run.folder, config)
    batch = synthetic_batch(trainer, resolution, batch_size, online=False)
    steps = _Steps(run, trainer, cycle([batch]))
    steps.take(3)
    # The first save allocates page-locked memory; the second one only copies, under load.
    trainer.checkpoints.start(trainer.loader.state_bytes())
    steps.take(2)
    trainer.checkpoints.finish()
    expected = _copied_state(trainer)
    step = trainer.state.step
    began = time.perf_counter()
    trainer.checkpoints.start(trainer.loader.state_bytes())
    blocked = time.perf_counter() - began
    steps.take(4)  # no synchronization: the copies race with these steps
    trainer.checkpoints.finish()
    written = time.perf_counter() - began
    folder = trainer.paths.checkpoints / step_folder_name(step)
    stored = {spec: torch.empty_like(tensor, device="cpu") for spec, tensor in expected.items()}
    load_into([path for path in folder.iterdir() if is_shard_file(path.name)], stored)
    different = [
        spec.name
        for spec, tensor in expected.items()
        if not torch.equal(stored[spec], tensor.cpu())
    ]
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    copied = trainer.checkpoints.snapshot.staging.seconds_on_stream
    run.report(
        bytes=size, blocked_seconds=blocked, copy_seconds=copied, written_seconds=written,
        different=different,
    )  # fmt: skip
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:3]}"
    moved = sum(
        not torch.equal(shard.tensor, expected[spec])
        for spec, shard in trainer.state.tensors().items()
    )
    assert moved > len(expected) / 2, "the later steps changed nothing"
    return (
        f"{len(expected)} tensors, {size / 1e9:.2f} GB, equal; blocked {1e3 * blocked:.0f} ms, "
        f"copied in {1e3 * copied:.0f} ms, written in {written:.1f} s"
    )


def _choose_deterministic_kernels() -> None:
    """Make two runs of a job equal.

    The fused kernels of attention sum gradients in an order that varies, and so do cuDNN's
    convolutions, also with fixed algorithms: on an H200 two runs of ``tiny-sd2`` differed from the
    second step on. ``warn_only`` leaves kernels without a deterministic version as they are.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@dataclass
class Job:
    """The built-in training as a job below ``base``, in a forked process."""

    base: Path
    config: JobConfig
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None

    @property
    def log(self) -> Path:
        return self.base / "log"

    @property
    def checkpoints(self) -> Path:
        return self.base / "checkpoints"

    def start(self) -> BaseProcess:
        channel = self.base / "input" / "data" / "train"
        if not channel.is_dir():
            write_shards(channel, 64)
        document = write_document(self.config, self.base)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._run, args=(document,))
        process.start()
        return process

    def _run(self, document: Path) -> None:
        descriptor = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = sys.stdout
        os.environ |= {"SAGEMAKER_BASE_DIR": str(self.base), **self.environment}
        _choose_deterministic_kernels()
        warnings.filterwarnings("once")
        self.prepare()
        train.main(["--stage", self.config.stage.name, "--document", str(document)])

    def run(self) -> list[dict[str, Any]]:
        """Run to the end; return the events of this attempt."""
        before = len(self.events())
        process = self.start()
        process.join()
        assert process.exitcode == 0, f"the job ended with {process.exitcode}: {self.last_line()}"
        return self.events()[before:]

    def events(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line[len(PREFIX) :]) for line in lines if line.startswith(PREFIX)]

    def nondeterministic(self) -> list[str]:
        """Return PyTorch's warnings of kernels that have no deterministic version."""
        text = self.log.read_text(errors="replace")
        return sorted(set(re.findall(r"(\w+) does not have a deterministic", text)))

    def last_line(self) -> str:
        errors = [event["message"] for event in self.events() if event["kind"] == "error"]
        lines = self.log.read_text(errors="replace").splitlines()
        return (errors or lines or [""])[-1]

    def digests(self, step: int) -> dict[str, str]:
        """Return the digests of a checkpoint's tensors; it must be complete."""
        marker = json.loads((self.checkpoints / step_folder_name(step) / MARKER).read_bytes())
        files = {file["name"]: file["blake3"] for file in marker["files"]}
        return {name: digest for name, digest in files.items() if is_shard_file(name)}

    def copy_to(self, base: Path, *, without: int) -> Job:
        """Return a job that starts from this one's checkpoints without those of a step."""
        ignored = shutil.ignore_patterns("final", step_folder_name(without))
        shutil.copytree(self.checkpoints, base / "checkpoints", ignore=ignored)
        shutil.copytree(self.base / "input", base / "input")
        return replace(self, base=base)


def _losses(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def _require_same_end(job: Job, losses: dict[int, float], other: Job, last: int) -> None:
    """Compare the losses, of some steps of ``job``, and its last checkpoint with another job's."""
    expected = _losses(other.events())
    different = {
        step: loss - expected[step] for step, loss in losses.items() if loss != expected[step]
    }
    shown = ", ".join(f"{step} by {by:.0e}" for step, by in [*different.items()][:3])
    assert not different, f"{job.base.name}: losses of {len(different)} steps differ: {shown}"
    assert job.digests(last) == other.digests(last), f"{job.base.name}: states differ"


def _job(run: PartRun, name: str, preset: str, steps: int, every: int, **training: Any) -> Job:
    config = configure(preset, 32, 4, log_every=1, **training)
    stage = replace(config.stage, max_steps=steps)
    checkpoint = replace(config.checkpoint, every_steps=every, keep_last=5)
    return Job(run.folder / name, replace(config, stage=stage, checkpoint=checkpoint))


def resume(run: PartRun) -> str:
    """Kill a job after a checkpoint, start it again, and compare its last state and losses."""
    saved = 4 if run.quick else 40
    presets = ("tiny-mmdit",) if run.quick else ("tiny-mmdit", "tiny-sd2")
    for preset in presets:
        undisturbed = _job(run, f"{preset}-undisturbed", preset, 2 * saved, saved)
        undisturbed.run()
        killed = _job(run, f"{preset}-killed", preset, 2 * saved, saved)
        process = killed.start()
        marker = killed.checkpoints / step_folder_name(saved) / MARKER
        while not marker.exists():
            assert process.is_alive(), f"ended before its checkpoint: {killed.last_line()}"
            time.sleep(0.002)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        reached = max(_losses(killed.events()))
        events = killed.run()
        [start] = [event for event in events if event["kind"] == "start"]
        resumed = start["resumed_from_step"]
        assert resumed == saved, f"{preset}: resumed from step {resumed}"
        details = {"reached": reached, "nondeterministic": killed.nondeterministic()}
        run.report(**{preset: details})
        # Those before the kill, too: if these differ, the kernels vary, and not the resume.
        _require_same_end(killed, _losses(killed.events()), undisturbed, 2 * saved)
    return (
        f"{', '.join(presets)}: killed after step {saved}, {saved} steps after the resume equal "
        "bit for bit, with optimizer and EMA"
    )


def optimizers(run: PartRun) -> str:
    """Resume PyTorch's optimizers from their checkpoints; compare with uninterrupted jobs."""
    return _resume_optimizers(run, ["adamw", "adafactor", "muon"])


def adamw8bit(run: PartRun) -> str:
    """The same for bitsandbytes' optimizer, which is a package of its own."""
    if run.device == "cpu" or not run.optional or not (run.optional / "bitsandbytes").is_dir():
        raise NotInstalledError("bitsandbytes, below --optional, for a GPU")
    return _resume_optimizers(run, ["adamw8bit"])


def _resume_optimizers(run: PartRun, names: Sequence[str]) -> str:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_resume_optimizer, args=(run, name, results)) for name in names
    ]
    for process in processes:
        process.start()
        if run.device == "cpu":
            process.join()
    outcomes = dict(results.get() for _ in processes)
    run.report(**outcomes)
    failed = {name: text for name, text in outcomes.items() if text != "equal"}
    assert not failed, "; ".join(f"{name}: {text}" for name, text in failed.items())
    return f"{', '.join(outcomes)}: 3 steps after the resume equal bit for bit"


def _resume_optimizer(run: PartRun, name: str, results: Any) -> None:
    try:
        if name == "adamw8bit":
            # It starts CUDA when it is imported, and diffusers imports it where it is installed.
            sys.path.append(str(run.optional))
        optimizer = replace(configure("tiny-mmdit", 32, 4).training.optimizer, name=name)
        whole = _job(run, f"{name}-whole", "tiny-mmdit", 6, 3, optimizer=optimizer)
        whole.run()
        resumed = whole.copy_to(run.folder / f"{name}-resumed", without=6)
        losses = _losses(resumed.run())
        assert sorted(losses) == [4, 5, 6], f"resumed at step {min(losses, default=0)}"
        _require_same_end(resumed, losses, whole, 6)
        results.put((name, "equal"))
    except Exception as error:
        results.put((name, f"{type(error).__name__}: {error}"))


# ---------------------------------------------------------------------- faults and sharding


def nan(run: PartRun) -> str:
    """Let the loss of one step be NaN; weights and optimizer must stay as they are."""
    trainer = make_trainer(run.accelerator(), run.folder, configure("tiny-mmdit", 32, 4))
    batches = cycle([synthetic_batch(trainer, 32, 4, online=True)])
    steps = _Steps(run, trainer, batches)
    steps.take(2)
    before = _copied_state(trainer)
    with _nan_loss(1, 1):
        steps.take(1)
    # The average moves with every step, also with one that changes no weight.
    changed = [
        spec.name
        for spec, shard in trainer.state.tensors().items()
        if not spec.name.startswith("ema.") and not torch.equal(shard.tensor, before[spec])
    ]
    run.report(changed=changed)
    assert not changed, f"the skipped step changed {changed[:3]}"
    return f"a step with a NaN changes none of {len(before)} tensors"


@contextmanager
def _nan_loss(first: int, last: int) -> Iterator[None]:
    """Make the loss NaN in these passes, counted from 1."""
    finite, passes = TrainingLoss.mean, 0

    def loss(self: TrainingLoss, prediction: Tensor, target: Any) -> Tensor:
        nonlocal passes
        passes += 1
        value = finite(self, prediction, target)
        return value * float("nan") if first <= passes <= last else value

    TrainingLoss.mean = loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingLoss.mean = finite  # type: ignore[method-assign]


def rollback(run: PartRun) -> str:
    """Let the loss of three steps be NaN; the job returns to its checkpoint and continues."""
    job = _job(run, "job", "tiny-mmdit", 14, 5, max_nonfinite_steps=2)
    diverging = ExitStack()  # the job's process ends without leaving it
    events = replace(job, prepare=lambda: diverging.enter_context(_nan_loss(8, 10))).run()
    [event] = [event for event in events if event.get("code") == "rolled-back"]
    [end] = [event for event in events if event["kind"] == "end"]
    assert event["step"] == 5, f"rolled back to step {event['step']}"
    assert (end["reason"], end["step"]) == ("done", 14)
    after = _losses(events[events.index(event) :])
    assert all(map(math.isfinite, after.values())), "a loss after the rollback is not finite"
    return f"three NaN in a row roll back from step 10 to 5; then {len(after)} losses are finite"


def fsdp(run: PartRun) -> str:
    """Shard over one process, evaluate after every second step, and compare the losses."""
    results = {}
    for strategy in ("shard_grad_op", "full_shard"):
        job = _job(run, f"{strategy}-plain", "tiny-mmdit", 6, 6)
        environment = {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(23_400 + len(strategy)),
        }  # fmt: skip

        def sharded(strategy: str = strategy) -> None:
            choose = ParallelPlan.choose
            ParallelPlan.choose = lambda *arguments: replace(  # type: ignore[method-assign]
                choose(*arguments), sharding=strategy
            )

        job = replace(job, environment=environment, prepare=sharded)
        expected = _losses(job.run())
        evaluation = replace(
            job.config.evaluation, every_steps=2, prompts=("a word", "two words"),
            num_inference_steps=2, guidance_scale=2.0,
        )  # fmt: skip
        base = run.folder / f"{strategy}-evaluated"
        write_shards(base / "input" / "data" / "validation", 7)
        evaluated = replace(job, base=base, config=replace(job.config, evaluation=evaluation))
        events = evaluated.run()
        count = sum(event["kind"] == "eval" for event in events)
        losses = _losses(events)
        results[strategy] = {"losses": losses, "without": expected, "evaluations": count}
        run.report(**results)
        assert count == 3, f"{strategy}: {count} evaluations"
        _require_same_end(evaluated, losses, job, 6)
    return f"{', '.join(results)}: losses with and without evaluations equal bit for bit"


# ---------------------------------------------------------------------- input and node


def loader(run: PartRun) -> str:
    """Train from JPEGs; the step events tell how long the GPU waited for them."""
    preset, resolution, batch, steps = "dit-xl", 256, 64, 60
    if run.quick:
        preset, resolution, batch, steps = "tiny-sd2", 32, 4, 6
    images = 16 if run.quick else 128
    channel = run.folder / "job" / "input" / "data" / "train"
    channel.mkdir(parents=True)
    photos = [photo(64 if run.quick else 512, number) for number in range(images)]
    for shard in range(1 if run.quick else 16):
        with webdataset.TarWriter(str(channel / f"{shard:03d}.tar")) as writer:
            for number, content in enumerate(photos):
                key = f"{shard:03d}{number:04d}"
                writer.write({"__key__": key, "jpg": content, "txt": f"photo {number}"})
    config = configure(
        preset,
        resolution,
        batch,
        # Large text encoders take long to build, and little of a step.
        content=None if run.quick else with_small_encoders(preset),
        decode_workers=1 if run.quick else 8,
        log_every=steps // 3,
    )
    config = replace(
        config,
        data=replace(config.data, image_key="jpg"),
        stage=replace(config.stage, max_steps=steps),
        checkpoint=replace(config.checkpoint, save=False),
    )
    events = Job(run.folder / "job", config).run()
    last = [event for event in events if event["kind"] == "step"][-1]
    share, speed = last["data_wait_share"], last["images_per_second"]
    run.report(share=share, images_per_second=speed, step=last)
    workers = config.training.decode_workers
    return (
        f"{preset} at {resolution} px: waits for data {share:.1%} of the time at {speed:.0f} "
        f"images/s with {workers} decode workers on {os.cpu_count()} cores"
    )


def node(run: PartRun) -> str:
    """Read NVML twice and run the doctor on this node."""
    counters = NodeCounters.open()
    before = counters.read(time.monotonic(), [os.getpid()])
    if run.device == "cuda":
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(200):
            matrix @ matrix
        torch.cuda.synchronize()
    else:
        time.sleep(0.1)
    fields = event_fields(before, counters.read(time.monotonic(), [os.getpid()]))
    gpus = fields["gpus"]
    run.report(gpus=gpus)
    if run.device == "cuda":
        assert gpus, "NVML reports no GPU"
        needed = {"utilization", "memory_used", "temperature", "sm_clock", "power"}
        missing = needed - gpus[0].keys()
        assert not missing, f"NVML lacks {', '.join(sorted(missing))}"
    verdict = _doctor(run)
    run.report(doctor=verdict)
    read = f"NVML: {len(gpus[0])} figures" if gpus else "no GPU"
    return f"{read}; doctor: {verdict['level']}: {verdict['sentence']}"


def _doctor(run: PartRun) -> dict[str, Any]:
    config = configure("tiny-sd2", 32, 4) if run.quick else configure("sd2", 512, 32)
    base = run.folder / "doctor"
    write_shards(base / "input" / "data" / "train", 64)
    document = write_document(config, base)
    verdict = base / "verdict.json"
    command = [sys.executable, "-m", "sm_train.entrypoints.probes.worker"]
    command += ["--stage", config.stage.name, "--document", str(document)]
    command += ["--verdict", str(verdict)]
    environment = os.environ | {"SAGEMAKER_BASE_DIR": str(base)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert verdict.exists(), result.stderr.splitlines()[-1:] or "the doctor wrote no verdict"
    document_of_verdict: dict[str, Any] = json.loads(verdict.read_bytes())
    return document_of_verdict | {"output": result.stdout.splitlines()[-40:]}


PARTS = (
    Part("families", families, 60),
    Part("sync", sync, 40),
    Part("sd2", sd2, 110),
    Part("snapshot", snapshot, 75),
    Part("resume", resume, 75),
    Part("mmdit", mmdit, 75),
    Part("mmdit-compile", mmdit_compile, 110),
    Part("fsdp", fsdp, 60),
    Part("nan", nan, 30),
    Part("rollback", rollback, 30),
    Part("optimizers", optimizers, 60),
    Part("adamw8bit", adamw8bit, 40),
    Part("loader", loader, 60),
    Part("node", node, 60),
    Part("sd2-compile", sd2_compile, 230),
    Part("mmdit-fp8", mmdit_fp8, 230),
    Part("encoders", encoders, 120),
)
