"""Runs the product's training loop on a fake GPU; see :mod:`tests.support.fake_gpu`."""

from __future__ import annotations

from tests.support.fake_gpu import device

device.load()

import contextlib  # noqa: E402  everything else may import PyTorch
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from tests.support.fake_gpu import FakeRun  # noqa: E402
from tests.support.fake_gpu.memory import MemoryTracker  # noqa: E402
from tests.support.fake_gpu.recorder import Recorder  # noqa: E402

GPUS_PER_NODE = 8

SCALARS = {"log_steps": 0.25}
"""Values of the scalars that the host reads: any positive seconds, no stop, no skipped step."""


class _EndOfRunError(Exception):
    """The loop has finished its steps: what follows writes files."""


class _Heartbeat:
    """Stands in for the heartbeat and observes the loop's phases."""

    def __init__(self, steps: int, tracker: MemoryTracker | None) -> None:
        self._steps, self._tracker = steps, tracker

    def add_busy(self, *_: Any) -> None: ...

    def report_failed_saves(self, count: int) -> None: ...

    def enter(self, phase: Any, step: int) -> None:
        if phase.name == "FINISH":
            raise _EndOfRunError
        if phase.name == "DATA" and self._tracker is not None:
            # AdamW allocates its state in the first step.
            self._tracker.before_pass(first=step == 0)


class _Batches:
    """The product's loader, which reads and decodes real samples, outside of fake mode."""

    def __init__(self, loader: Any, run: FakeRun, trainer: Any) -> None:
        self._loader, self._run, self._trainer = loader, run, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        with _disable_current_modes():
            batches = iter(self._loader)
        while True:
            with _disable_current_modes():
                batch = next(batches)
                if self._run.latents:
                    batch = _with_latents(batch, self._run.preset, self._trainer.components)
            yield batch


def _with_latents(batch: Any, preset: str, components: Any) -> Any:
    """Return the batch as the loader yields it for shards with precomputed latents."""
    from sm_train.entrypoints.models.components import preset_caption_tokens, read_preset
    from sm_train.entrypoints.planning.measure import network_inputs

    config = dict(components.network.config)
    tokens = preset_caption_tokens(read_preset(preset))
    count, side = len(batch.origins), batch.noise.shape[-1]
    _, text = network_inputs(config, side, tokens)
    channels = config["in_channels"]
    shapes = [(2 * channels, side, side), text.states.shape[1:]]
    shapes += [] if text.pooled is None else [text.pooled.shape[1:]]
    latents = [torch.zeros(count, *shape, dtype=torch.float16).pin_memory() for shape in shapes]
    return replace(
        batch.with_tensors(batch.pixels[:, :0], batch.noise, batch.sizes, *latents), tokens=()
    )


def main() -> None:
    """Read runs from standard input and write their reports as the last line of the output."""
    runs = [FakeRun(**document) for document in json.load(sys.stdin)]
    recorder = Recorder("entrypoints", SCALARS)
    device.install(recorder.record_sync)
    _emulate_what_fake_tensors_cannot()
    probes = _probe(recorder)
    reports = [_run(run, recorder) for run in runs]
    print("\n" + json.dumps({"probes": probes, "reports": reports}), flush=True)
    # The checkpoint's thread still holds a file that cannot be written.
    os._exit(0)


def _probe(recorder: Recorder) -> dict[str, str]:
    """Return what the recorder reports for operations that block, or need a tensor's content."""
    pageable, pinned = torch.ones(4), torch.ones(4).pin_memory()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        value = torch.ones(4, device="cuda")
        operations: dict[str, Callable[[], Any]] = {
            "item": value.sum().item,
            "bool": lambda: bool(value.sum() > 0),
            "tolist": value.tolist,
            "equal": lambda: torch.equal(value, value),
            "cpu": value.cpu,
            "to the host, pageable": lambda: value.to("cpu", non_blocking=True),
            "to the host, pinned": lambda: torch.empty(4, pin_memory=True).copy_(
                value, non_blocking=True
            ),
            "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda"),
            "new_tensor": lambda: value.new_tensor([1.0, 2.0]),
            "full": lambda: torch.full((4,), 2.0, device="cuda"),
            "from pageable": lambda: pageable.to("cuda", non_blocking=True),
            "from pinned": lambda: pinned.to("cuda", non_blocking=True),
            "from pinned, blocking": lambda: pinned.to("cuda"),
            "from pin_memory": lambda: pageable.pin_memory().to("cuda", non_blocking=True),
            "pin_memory of the GPU's": value.pin_memory,
            "pin_memory of an expanded": lambda: pageable.expand(2, 4).pin_memory(),
            "synchronize": torch.cuda.synchronize,
            "event": torch.cuda.Event().synchronize,
            "nonzero": value.nonzero,
            "mask": lambda: value[value > 0],
        }
        return {name: _outcome(operation, recorder) for name, operation in operations.items()}


def _outcome(operation: Callable[[], Any], recorder: Recorder) -> str:
    recorder.clear()
    try:
        operation()
    except Exception as error:
        return type(error).__name__
    return ", ".join(sorted({cause for cause, _ in recorder.syncs})) or "asynchronous"


def _run(run: FakeRun, recorder: Recorder) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    # A checkpoint may still be being written.
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, _process_group(run.world_size):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, recorder:
            trainer = _trainer(run, Path(folder))
            trainer.loader = _Batches(trainer.loader, run, trainer)
            tracker = MemoryTracker(trainer) if run.track_memory else None
            recorder.clear()
            _train(trainer, _Heartbeat(run.steps, tracker))
            peak = tracker.finish() if tracker else {}
    AcceleratorState._reset_state(True)
    return {
        "syncs": [
            {"cause": cause, "function": function, "count": count}
            for (cause, function), count in sorted(recorder.syncs.items())
        ],
        "collectives": [
            {"name": name, "function": function, "ranks": ranks, "bytes": size, "count": count}
            for (name, function, ranks, size), count in sorted(recorder.collectives.items())
        ],
        "peak_bytes": peak,
    }


def _train(trainer: Any, heartbeat: _Heartbeat) -> None:
    from sm_train.entrypoints.base.signals import StopSignal

    with contextlib.suppress(_EndOfRunError):
        trainer.run(heartbeat, StopSignal(trainer.paths.stop_request))


@contextlib.contextmanager
def _process_group(world_size: int) -> Iterator[None]:
    """Join PyTorch's "fake" process group, whose collectives return at once, as rank 0."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in variables.items()})
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield
    dist.destroy_process_group()
    for name in variables:
        del os.environ[name]


def _trainer(run: FakeRun, folder: Path) -> Any:
    """Build the product's trainer as ``train.py`` does."""
    from accelerate import Accelerator
    from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
    from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
    from sm_train.entrypoints.distributed.fsdp import ddp_options
    from sm_train.entrypoints.job_interface.events import EventLog
    from sm_train.entrypoints.models.builder import build_components
    from sm_train.entrypoints.training.trainer import Trainer

    from tests.support.cluster.training_jobs import write_shards

    config = _job_config(run, folder)
    nodes = max(1, run.world_size // GPUS_PER_NODE)
    hosts = tuple(f"algo-{number}" for number in range(1, nodes + 1))
    rank = DataRank(hosts, 0, 0, run.world_size // nodes)
    paths = SageMakerPaths(folder)
    with _disable_current_modes():
        write_shards(paths.channel("train"), shards=1, each=8 * run.world_size)
        catalog = build_catalog(
            paths.channel("train"),
            None,
            # Without other nodes, whose shards are not here.
            DataRank(hosts[:1], 0, 0, 1),
            lambda value: [value],
            folder / "walk",
        )
        accelerator = Accelerator(
            mixed_precision="bf16",
            # A static graph needs the addresses of tensors in its first pass.
            kwargs_handlers=[replace(ddp_options(), static_graph=False)],
        )
    components = build_components(config.model, run.resolution, components=None, previous=None)
    events = EventLog(node=0, rank=0)
    return Trainer(config, components, accelerator, paths, events, catalog, rank)


def _job_config(run: FakeRun, folder: Path) -> Any:
    from sm_train.entrypoints.job_interface.job_config import read_job_config

    from tests.support.cluster.training_jobs import tiny_run
    from tests.support.run_documents import write_job_file

    document = tiny_run(
        preset=run.preset,
        precision="bf16",
        max_steps=run.steps,
        log_every=2,
        caption_dropout=0.5,
        resolution=run.resolution,
        per_device_batch_size=run.per_device_batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        sharding=run.sharding,
        activation_checkpointing=run.activation_checkpointing,
        text_encoders=run.text_encoders,
        model={"lora": {"rank": run.lora_rank} if run.lora_rank else None},
    )
    return read_job_config(write_job_file(folder, document), document.stages[0].name)


def _emulate_what_fake_tensors_cannot() -> None:
    """Replace functions that read the content of tensors, or need kernels."""
    import torch.distributed.device_mesh as meshes
    import torch.nn.parallel.distributed as ddp
    from sm_train.entrypoints.distributed.object_exchange import ObjectExchange
    from sm_train.entrypoints.models.builder import CaptionTokenizer

    _run_for_real(CaptionTokenizer, "__call__")
    _run_for_real(meshes, "init_device_mesh")
    # The fake group's store holds nothing; here every rank has what rank 0 has.
    ObjectExchange.all_gather = lambda self, value: [value] * self.world_size
    ObjectExchange.gather = lambda self, value: [value] * self.world_size
    ddp._verify_param_shape_across_processes = lambda *_: None
    ddp._sync_module_states = lambda **_: None
    initialize = ddp.DistributedDataParallel.__init__

    def with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        # The fake group's all-reduce returns no tensor, which DDP's own hook expects.
        self.register_comm_hook(None, lambda _, bucket: _all_reduce(bucket.buffer()))
        self.logger = _NoTimers()
        self.reducer = _FixedBuckets(self.reducer)

    ddp.DistributedDataParallel.__init__ = with_hook  # type: ignore[method-assign]


def _run_for_real(owner: Any, name: str) -> None:
    """Let ``owner``'s function ``name`` work on real tensors."""
    function = getattr(owner, name)

    def outside_fake_mode(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    setattr(owner, name, outside_fake_mode)


def _all_reduce(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(gradients, async_op=True)
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(gradients)
    return reduced


class _NoTimers:
    """DDP's logger without statistics, whose timers need CUDA events."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


class _FixedBuckets:
    """DDP's reducer with its first buckets; it would exchange the order of later ones."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


if __name__ == "__main__":
    main()
