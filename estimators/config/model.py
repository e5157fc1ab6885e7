"""The run file's ``model``: the network and what it learns to predict."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from sm_train.entrypoints.job_interface.job_config import (
    JobConfigError,
    LoraConfig,
    ModelConfig,
    PredictionType,
)
from sm_train.entrypoints.job_interface.lora_layers import TRAINS_TEXT_ENCODER, require_targets
from sm_train.estimators.config.fields import (
    Fraction,
    LayerName,
    License,
    PositiveFloat,
    PositiveInt,
    S3Folder,
    Section,
)
from sm_train.estimators.config.preset_file import PresetFileError, canonical, is_preset_file
from sm_train.estimators.config.presets import (
    preset_layers,
    preset_names,
    preset_prediction_types,
    preset_trains_text_encoder,
    unknown_preset,
)


class LoraSection(Section):
    """A low-rank adapter (LoRA, arXiv 2106.09685), trained on frozen pretrained weights."""

    rank: PositiveInt = Field(
        default=16,
        description="Rank of each layer's update: more is more capacity and a larger file.",
    )
    alpha: PositiveFloat | None = Field(
        default=None,
        description="The update is multiplied by alpha / rank. None takes the rank.",
    )
    targets: Annotated[list[LayerName], Field(min_length=1)] | None = Field(
        default=None,
        description="Names of layers that are extended, in every block, as in PEFT: to_q, "
        "attn1.to_q, ff.net.2. None takes the projections of attention.",
    )
    dropout: Fraction = Field(
        default=0.0, description="Dropout of the input of each extended layer's update."
    )

    def job_config(self) -> LoraConfig:
        return self._job_struct(
            LoraConfig, alpha=float(self.rank) if self.alpha is None else self.alpha
        )


class ModelSection(Section):
    """The model that is trained."""

    preset: str | None = Field(
        default=None,
        description="Name of a model configuration that ships with sm-train, or a JSON file of the "
        "same form, relative to the run file, such as ./mine.json. With `entry` it only describes "
        "the script's model to `cost` and `check`, and may be left out.",
        json_schema_extra=lambda schema: schema.update(
            anyOf=[
                {"enum": list(preset_names())},
                {"type": "string", "pattern": r"\.json$"},
                {"type": "null"},
            ]
        ),
    )
    preset_content: str | None = Field(
        default=None,
        description="JSON of the preset's file. sm-train writes it to the bundle's run file; leave "
        "it out.",
    )
    components: S3Folder | None = Field(
        default=None,
        description="S3 prefix of pretrained components in diffusers' folder layout: vae, "
        "text_encoder and tokenizer, which stay frozen, and optionally the network to start from. "
        "None initializes all weights randomly.",
    )
    local_components: str | None = Field(
        default=None,
        description="Folder of the same components on this machine, for `submit --local`.",
    )
    prediction_type: PredictionType | None = Field(
        default=None,
        description="What the network predicts. None takes what the pretrained network of "
        "model.components predicts, or else the preset's default: U-Nets predict "
        "the noise (epsilon) or the velocity, transformers a rectified flow. PixArt (dit-xl) "
        "supports all three.",
    )
    zero_terminal_snr: bool | None = Field(
        default=None,
        description="Whether to rescale the noise schedule to zero terminal SNR, so that its last "
        "step is pure noise (arXiv 2305.08891). Requires prediction_type: v_prediction. None takes "
        "the pretrained model's setting, or else false.",
    )
    min_snr_gamma: PositiveFloat | None = Field(
        default=None,
        description="Gamma of the min-SNR loss weighting of U-Nets, usually 5 (arXiv 2303.09556). "
        "None weights all timesteps equally. Not with zero_terminal_snr, whose last timestep would "
        "have the weight 0.",
    )
    timestep_shift: PositiveFloat | None = Field(
        default=None,
        description="Shift of the sampled timesteps towards noise, for flow models. None takes the "
        "pretrained model's shift, or else resolution / 256.",
    )

    lora: LoraSection | None = Field(
        default=None,
        description="Train a low-rank adapter instead of the weights; {} takes the defaults. The "
        "final model is then a LoRA file.",
    )
    accept_components: bool = Field(
        default=False,
        description="Continue a run although model.components now holds another autoencoder or "
        "text encoder than its checkpoint was trained with; an event records the difference. "
        "`--accept-components` sets it.",
    )
    license: License | None = Field(
        default=None,
        description="License of the trained model for its model card, as Hugging Face abbreviates "
        "it: apache-2.0, openrail++, cc-by-nc-4.0, other. None writes `unknown`.",
    )

    def job_config(self) -> ModelConfig:
        return self._job_struct(ModelConfig, lora=self.lora and self.lora.job_config())

    def _check_preset_exists(self, preset: str) -> None:
        if is_preset_file(preset):
            if self.preset_content is None:
                raise ValueError(f"preset: {preset!r}: the file was not read")
            try:
                canonical(self.preset_content)
            except PresetFileError as error:
                raise ValueError(f"preset: {preset!r}: {error}") from None
            return
        if self.preset_content is not None:
            raise ValueError("preset_content: is that of a preset file; remove it")
        if preset not in preset_names():
            raise ValueError(f"preset: {preset!r} {unknown_preset(preset)}")

    def _check_lora(self, lora: LoraSection, preset: str) -> None:
        if preset_trains_text_encoder(preset, self.preset_content):
            raise ValueError(f"lora: {TRAINS_TEXT_ENCODER}")
        class_name, layers = preset_layers(preset, self.preset_content)
        try:
            # A new preset that is not measured yet has no list of layers.
            require_targets(lora.job_config(), class_name, layers)
        except JobConfigError as error:
            if layers:
                reason = str(error).removeprefix("model.lora.")
                raise ValueError(f"lora: {reason}") from None

    @model_validator(mode="after")
    def _check_preset(self) -> ModelSection:
        preset = self.preset
        if preset is None:
            return self
        self._check_preset_exists(preset)
        supported = preset_prediction_types(preset, self.preset_content)
        prediction_type = self.prediction_type or supported[0]
        is_flow = prediction_type == "flow"
        if prediction_type not in supported:
            raise ValueError(
                f"prediction_type: {self.preset} supports {' or '.join(supported)}, not "
                f"{prediction_type}; remove it"
            )
        if self.zero_terminal_snr and prediction_type != "v_prediction":
            raise ValueError(
                f"zero_terminal_snr: requires prediction_type: v_prediction, and {self.preset} has "
                f"{prediction_type}"
            )
        if self.zero_terminal_snr and self.min_snr_gamma is not None:
            raise ValueError(
                "min_snr_gamma: gives the last timestep of zero_terminal_snr, whose SNR is 0, the "
                "weight 0, so it would never be trained; remove one of the two"
            )
        if self.lora is not None:
            self._check_lora(self.lora, preset)
        for key, applies in (("min_snr_gamma", not is_flow), ("timestep_shift", is_flow)):
            if getattr(self, key) is not None and not applies:
                raise ValueError(f"{key}: does not apply to {prediction_type}; remove it")
        return self
