"""Predict the seconds of an optimizer step from the model's figures and the GPU's data sheet.

A roofline (Williams et al. 2009) per micro-batch of b images:

    pass = launch + b × (FLOP ÷ (efficiency × peak FLOP/s) + traffic × activations ÷ bandwidth)

``activations`` are the bytes that autograd keeps for one image: a measure of the memory that
element-wise layers, normalizations and convolutions move. ``traffic`` is how often each of these
bytes is moved. Models of few FLOP per byte (UNets) are bound by memory, large transformers by
matrix products. Activation checkpointing repeats the forward pass: both terms × 4/3, or × 7/6 for
every second layer. Kernels that a compiler fuses move fewer bytes. Frozen encoders that run in the
job only have a forward pass.

    step = passes × pass + optimizer bytes ÷ bandwidth + exposed communication (:mod:`network`)

The calibrated constants below come from the published points in ``benchmarks/data/speeds.csv``:
``python benchmarks/speed_calibration.py`` fits them and prints the validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sm_train.cost.network import (
    PCIE_BYTES_PER_SECOND,
    CollectiveCalls,
    GpuNetwork,
    communication,
    step_collectives,
)

ActivationCheckpointing = Literal[True, False, "selective"]
"""Which of the repeated layers are recomputed: all, none, or every second one."""


BF16_PRECISIONS = ("bf16", "fp8")
"""Precisions of the run file whose passes run under bf16 autocast; fp8 converts linear layers."""

TextEncoderPlacement = Literal["replicated", "sharded", "cpu"]
"""Where frozen text encoders are: on each GPU, sharded over those of a node, or in host memory."""


@dataclass(frozen=True)
class GpuFigures:
    """One accelerator: peak dense FLOP/s in the precision of the work, and bytes per second.

    With fp8, ``peak_flops`` are those of bf16, in which the other layers compute.
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    fp8_peak_flops: float | None = None


@dataclass(frozen=True)
class Fp8Work:
    """The layers that compute in fp8: ``flops`` of an image's forward pass.

    For each image, ``numbers`` of activations and gradients are cast in a forward and backward
    pass, and all ``parameters`` of these layers in each pass.
    """

    flops: float
    numbers: float
    parameters: int


@dataclass(frozen=True)
class StepWork:
    """The work of one GPU in an optimizer step.

    ``flops`` counts the trained network's forward and backward pass for one image without
    recomputation, ``encoder_flops`` the forward pass of frozen encoders that run in the job.
    ``activation_bytes`` are those kept for one image without activation checkpointing, and
    ``score_bytes`` those of its attention scores, which only a kernel that is not fused (math)
    writes to memory. ``text_encoder_bytes`` are the weights that ``text_encoders`` gathers or
    copies in each pass. ``fp8`` is the part that computes in fp8, None without.
    ``exchanged_parameters`` are those that sharding neither gathers nor scatters.
    ``trained_parameters`` have gradients, None means all. ``communication_units`` are DDP's buckets
    or FSDP's units, None if unknown.
    """

    images: int
    passes: int
    flops: float
    activation_bytes: float
    parameters: int
    trained_parameters: int | None = None
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    sharding: str = "none"
    communication_units: int | None = None
    activation_checkpointing: ActivationCheckpointing = False
    compiled: bool = False
    encoder_flops: float = 0.0
    text_encoders: TextEncoderPlacement = "replicated"
    text_encoder_bytes: float = 0.0
    fp8: Fp8Work | None = None
    exchanged_parameters: int = 0
    score_bytes: float = 0.0


Resource = Literal["compute", "memory", "network", "launches"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)


@dataclass(frozen=True)
class StepShares:
    """Shares of a step's predicted seconds, which sum to 1.

    ``compute`` is arithmetic at the efficiency that matrix products reach, ``memory`` the bytes
    that other kernels and the optimizer move, ``network`` the communication that compute does not
    hide, and ``launches`` the time in which kernels are launched and the GPU waits.
    """

    compute: float
    memory: float
    network: float
    launches: float

    @property
    def limit(self) -> Resource:
        """The largest share."""
        return max(RESOURCES, key=lambda resource: getattr(self, resource))

    def describe(self) -> str:
        """Return the shares as a phrase, the largest first; shares below 0.5 % are left out."""
        shares = {resource: getattr(self, resource) for resource in RESOURCES}
        return ", ".join(
            f"{resource} {share:.0%}"
            for resource, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        )


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step by purpose."""

    launch: float
    arithmetic: float
    memory: float
    optimizer: float
    exposed_communication: float

    @property
    def total(self) -> float:
        return (
            self.launch
            + self.arithmetic
            + self.memory
            + self.optimizer
            + self.exposed_communication
        )

    @property
    def shares(self) -> StepShares:
        """What limits the step."""
        return StepShares(
            compute=self.arithmetic / self.total,
            memory=(self.memory + self.optimizer) / self.total,
            network=self.exposed_communication / self.total,
            launches=self.launch / self.total,
        )


@dataclass(frozen=True)
class Calibration:
    """The constants that are fitted to published points."""

    ampere_efficiency: float
    """Share of the peak that matrix products reach on an A100 or A10G."""
    efficiency: float
    """The same on later generations, whose power limit is reached first."""
    traffic: float
    """Bytes moved per byte of kept activations, by kernels that are not fused."""
    fused_share: float
    """Share of ``traffic`` that remains with fused kernels (torch.compile, Transformer Engine)."""
    launch_seconds: float
    """Seconds of a pass in which kernels are launched and the GPU waits."""


CALIBRATION = Calibration(
    ampere_efficiency=0.680,
    efficiency=0.498,
    traffic=19.8,
    fused_share=0.368,
    launch_seconds=0.0593,
)

COMPILED_LAUNCH_SECONDS = 0.010
"""Compiled passes launch fewer kernels, or replay a CUDA graph (assumed)."""

RECOMPUTATION: dict[ActivationCheckpointing, float] = {False: 1.0, "selective": 7 / 6, True: 4 / 3}
"""Activation checkpointing repeats the forward pass, a third of the FLOPs, or half of it.

The choices are in the order of the memory that they need, most first."""

FP8_CAST_BYTES = 10
"""Traffic of a cast, for each number. The arithmetic of it moves 5 bytes: a bf16 value is read for
the largest one of its tensor, and again to be scaled, and one byte is written. On an H200 a step of
``mmdit-2b`` took 123 ms more in fused kernels than in bf16 (``benchmarks/gpu.py``), twice that."""

OPTIMIZER_BYTES = 40
"""Per parameter: AdamW reads weight, gradient and both moments and writes three of them (28), the
EMA reads the weight and itself and writes itself (12); all fp32."""

SCORE_PASSES = 6
"""Times that attention scores are written and read by the math kernel in both passes (counted from
softmax's and two products' operands)."""

LEAST_STEP_SECONDS = 0.005
"""No training loop on GPUs is faster: a step launches hundreds of kernels of about 10 µs (assumed).
"""

SPREAD = 1.55
"""P90 ÷ median and median ÷ P10 of a predicted speed. Left-out sources scatter less (docs/cost.md);
the rest allows for software that the points do not cover."""

UNCALIBRATED_SPREAD = 1.9
"""The same for a GPU generation or a precision without a calibration point (assumed)."""

PUBLISHED_POINTS = 97
"""Rows of ``benchmarks/data/speeds.csv``, which the constants are fitted to."""

CALIBRATED = ("A100", "H100", "H200", "B200", "L40S")
"""GPU generations with a calibration point."""


def spread(gpu: str, precision: str) -> float:
    """Return P90 ÷ median of the predicted speed on ``gpu``."""
    is_calibrated = gpu.startswith(CALIBRATED) and precision != "fp8"
    return SPREAD if is_calibrated else UNCALIBRATED_SPREAD


def calibration_words(gpu: str, precision: str) -> str:
    """Return what a prediction on ``gpu`` rests on, for its explanation."""
    if precision == "fp8":
        return (
            f"calibrated on {PUBLISHED_POINTS} published points in bf16 and one in fp8, so the "
            "range is wider"
        )
    if gpu.startswith(CALIBRATED):
        return f"calibrated on {PUBLISHED_POINTS} published points"
    generation = gpu.split("-")[0]
    return (
        f"calibrated on {PUBLISHED_POINTS} published points of other GPUs; none of {generation} is "
        "published, so the range is wider"
    )


def step_seconds(
    work: StepWork, gpu: GpuFigures, network: GpuNetwork, calibration: Calibration = CALIBRATION
) -> StepSeconds:
    """Return the median prediction of a step's seconds."""
    ampere = gpu.name.startswith(("A100", "A10G"))
    reached = (calibration.ampere_efficiency if ampere else calibration.efficiency) * gpu.peak_flops
    trained = work.parameters if work.trained_parameters is None else work.trained_parameters
    moved = calibration.traffic * (calibration.fused_share if work.compiled else 1.0)
    repeated = RECOMPUTATION[work.activation_checkpointing]
    flops = work.flops * repeated + work.encoder_flops
    # Encoders are assumed to move as many bytes per FLOP as the trained network.
    kept = work.activation_bytes * (repeated + work.encoder_flops / work.flops)
    per_image_memory = (moved * kept + SCORE_PASSES * work.score_bytes) / gpu.memory_bandwidth
    launch = COMPILED_LAUNCH_SECONDS if work.compiled else calibration.launch_seconds
    arithmetic = work.images * flops / reached
    memory = work.images * per_image_memory
    if work.fp8 is not None and gpu.fp8_peak_flops is not None:
        in_fp8 = work.images * 3 * work.fp8.flops * repeated
        arithmetic -= in_fp8 / reached * (1 - gpu.peak_flops / gpu.fp8_peak_flops)
        numbers = work.images * work.fp8.numbers * repeated + 2 * work.fp8.parameters
        memory += FP8_CAST_BYTES * numbers / gpu.memory_bandwidth
    exposed = exposed_communication(work, network, launch + arithmetic + memory)
    ranks = {"none": 1, "hybrid_shard": network.per_node}.get(work.sharding, network.gpus)
    return StepSeconds(
        launch=work.passes * launch,
        arithmetic=work.passes * arithmetic,
        memory=work.passes * memory,
        optimizer=OPTIMIZER_BYTES * trained / ranks / gpu.memory_bandwidth,
        exposed_communication=exposed,
    )


def exposed_communication(work: StepWork, network: GpuNetwork, pass_seconds: float) -> float:
    """Return a step's seconds of communication that ``pass_seconds`` of compute do not hide.

    Transfers of text encoders precede the pass. What their own arithmetic hides is left out.
    """
    trained = work.parameters if work.trained_parameters is None else work.trained_parameters
    exchanged = 0 if work.sharding == "none" else work.exchanged_parameters
    calls = step_collectives(
        work.sharding,
        work.parameters - exchanged,
        network,
        trained=trained - exchanged,
        units=work.communication_units,
        bf16=work.precision in BF16_PRECISIONS,
        reduce_bf16=work.reduce_dtype == "bf16",
        passes=work.passes,
    )
    encoders = work.passes * _text_encoder_seconds(work, network)
    return communication(calls, network, pass_seconds).exposed + encoders


def _text_encoder_seconds(work: StepWork, network: GpuNetwork) -> float:
    """Return the seconds in which a pass gathers or copies text encoders."""
    if work.text_encoders == "sharded":
        gather = CollectiveCalls("all_gather", "node", work.text_encoder_bytes, 1, "forward")
        return network.seconds(gather)
    if work.text_encoders == "cpu":
        return work.text_encoder_bytes / PCIE_BYTES_PER_SECOND
    return 0.0


def images_per_second(
    work: StepWork, gpu: GpuFigures, network: GpuNetwork, calibration: Calibration = CALIBRATION
) -> float:
    """Return the whole cluster's throughput; never more than its peak FLOP/s allow."""
    seconds = max(LEAST_STEP_SECONDS, step_seconds(work, gpu, network, calibration).total)
    return work.images * work.passes * network.gpus / seconds
