"""The run file's ``training``, ``evaluation`` and ``checkpoint``: the same in every stage."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator
from sm_train.entrypoints.job_interface.job_config import (
    CheckpointConfig,
    Compile,
    EvaluationConfig,
    Modulation,
    Precision,
    ReduceDtype,
    TextEncoders,
    TrainingConfig,
    VaePrecision,
)
from sm_train.estimators.config.fields import (
    Fraction,
    FunctionName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PromptText,
    Section,
    reject_bool,
)
from sm_train.estimators.config.optimization import (
    LrScheduleField,
    LrScheduleSection,
    OptimizerField,
    OptimizerSection,
)


class TrainingSection(Section):
    """The optimization settings that all stages share."""

    precision: Precision = Field(
        default="bf16",
        description="Precision of the forward and backward pass. bf16 is autocast; fp8 adds "
        "products of 8 bits in the linear layers of the network's blocks (torchao; on L4, L40S, "
        "H100 or newer); tf32 rounds the inputs of fp32 matrix products and convolutions to 10 "
        "bits of mantissa; fp32 rounds nothing.",
    )
    reduce_dtype: ReduceDtype = Field(
        default="fp32",
        description="Precision in which gradients are summed over GPUs. bf16 halves the traffic "
        "and rounds each partial sum to 8 bits of mantissa.",
    )
    vae_precision: VaePrecision = Field(
        default="auto",
        description="Precision in which the autoencoder encodes images during training. auto is "
        "fp32 unless its configuration says force_upcast: false, and then that of `precision`.",
    )
    text_encoders: TextEncoders = Field(
        default="auto",
        description="Where frozen text encoders are: replicated on every GPU, sharded over the "
        "GPUs of an instance (FSDP2), or on the cpu, from which they are copied for each batch of "
        "captions. auto is replicated if the memory plan then fits, and otherwise sharded, or cpu "
        "on a single GPU.",
    )
    modulation: Modulation = Field(
        default="exchanged",
        description="What layers that modulate a block by the timestep do when weights are "
        "sharded: exchanged sends vectors between GPUs, which each keep their rows; gathered "
        "gathers their weights with each block, a third of an MMDiT's traffic.",
    )
    compile: Compile = Field(
        default="auto",
        description="Whether to compile the repeated layers of the network (torch.compile). auto "
        "compiles on GPUs with PyTorch 2.11 or newer, unless `data.aspect_buckets` or "
        "`model.lora` is set. The first steps then take up to three minutes longer.",
    )
    seed: Annotated[int, BeforeValidator(reject_bool), Field(ge=0, lt=2**31)] = Field(
        default=0, description="Seed of all random numbers: initialization, order, noise, crops."
    )
    warmup_steps: NonNegativeInt = Field(
        default=1000,
        description="Number of steps over which the learning rate rises linearly from 0.",
    )
    optimizer: OptimizerField = Field(
        default=OptimizerSection(), description="The optimizer and its arguments."
    )
    lr_schedule: LrScheduleField = Field(
        default=LrScheduleSection(), description="The learning rate's schedule after the warm-up."
    )
    objective: FunctionName | None = Field(
        default=None,
        description="module:function of `code` that returns each sample's loss (B,), given the "
        "prediction and the target. None is the mean squared error, with the preset's weighting.",
    )
    max_grad_norm: PositiveFloat = Field(
        default=1.0, description="Maximum norm of the gradient (gradient clipping)."
    )
    caption_dropout: Fraction = Field(
        default=0.1,
        description="Fraction of captions replaced by the empty one, which classifier-free "
        "guidance needs.",
    )
    offset_noise: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.0,
        description="Strength of the noise that is equal in all pixels of a channel, for very dark "
        "and very bright images; 0.05 to 0.1 is usual.",
    )
    ema_decay: Fraction = Field(
        default=0.9999,
        description="Decay of the exponential moving average (EMA) of the weights; 0 disables it.",
    )
    ema_start: NonNegativeInt = Field(
        default=0,
        description="Step at which averaging starts. Until then the average equals the weights.",
    )
    max_nonfinite_steps: PositiveInt = Field(
        default=10,
        description="Number of consecutive steps with a non-finite gradient after which training "
        "rolls back to the latest checkpoint.",
    )
    max_nonfinite_share: Annotated[
        float, BeforeValidator(reject_bool), Field(gt=0, le=1, allow_inf_nan=False)
    ] = Field(
        default=0.5,
        description="Share of the last 1,000 steps that may have a non-finite gradient. The job "
        "fails beyond it, and names the samples.",
    )
    max_rollbacks: NonNegativeInt = Field(
        default=1,
        description="Rollbacks allowed before the job fails and lists the offending samples.",
    )
    decode_workers: Annotated[int, BeforeValidator(reject_bool), Field(ge=0, le=64)] = Field(
        default=8,
        description="Number of image decoders per GPU, each in a process of its own: an image that "
        "crashes its decoder costs one sample. 0 decodes in the training process, which such an "
        "image ends.",
    )
    log_every: PositiveInt = Field(
        default=50, description="Number of steps between two `step` events."
    )

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, objective: str | None) -> str | None:
        if objective is not None and ":" not in objective:
            raise ValueError("must be a module:function of your code, such as losses:huber")
        return objective

    def job_config(self) -> TrainingConfig:
        return self._job_struct(
            TrainingConfig,
            optimizer=self.optimizer.job_config(),
            lr_schedule=self.lr_schedule.job_config(),
        )


class EvaluationSection(Section):
    """Validation loss and sample images during training, computed with the averaged weights."""

    every_steps: PositiveInt = Field(
        default=5000,
        description="Number of steps between two evaluations. The last step is always evaluated.",
    )
    prompts: Annotated[list[PromptText], Field(max_length=64)] = Field(
        default_factory=list, description="Prompts of the images sampled in each evaluation."
    )
    num_inference_steps: Annotated[int, BeforeValidator(reject_bool), Field(ge=1, le=999)] = Field(
        default=30, description="Number of denoising steps per image."
    )
    guidance_scale: NonNegativeFloat = Field(
        default=5.0, description="Scale of classifier-free guidance; 1 disables it."
    )

    def job_config(self) -> EvaluationConfig:
        return self._job_struct(EvaluationConfig)


class CheckpointSection(Section):
    """How often checkpoints are written, which is how much work a restart repeats."""

    every_steps: PositiveInt = Field(
        default=1000, description="Number of steps between two checkpoints."
    )
    keep_last: Annotated[int, BeforeValidator(reject_bool), Field(ge=2)] = Field(
        default=3,
        description="Number of complete checkpoints to keep, the latest ones. One older stays "
        "until the next one is written, because uploads to S3 lag behind.",
    )
    save: bool = Field(
        default=True,
        description="Whether to write checkpoints and the final model. false is for jobs that only "
        "measure a speed: nothing of their training remains.",
    )

    def job_config(self) -> CheckpointConfig:
        return self._job_struct(CheckpointConfig)
