"""The model card of a final model: ``README.md`` with the front matter of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sm_train.entrypoints.job_interface.job_config import BUNDLE_VARIABLE, COMMIT_VARIABLE
from sm_train.entrypoints.models.component_files import describe_identity

CARD_FILE = "README.md"

GRID_FILE = "samples.png"
"""The grid of sample images in a model's folder."""

UNKNOWN_LICENSE = "unknown"
"""Hugging Face's identifier of a license that is not stated."""


@dataclass(frozen=True)
class TrainingRecord:
    """Where a model comes from; None is unknown.

    ``data_digest`` identifies the shards by what ``data_digest_covers`` says, ``bundle`` is the
    SHA-256 of the job's source bundle,
    ``commit`` that of the run file's repository. ``base_model`` is the Hub repository of the
    network that training started from. ``components`` has the identity of each frozen component
    with which the network was trained. ``data`` has what the index of each channel says of its
    images: a name and a text each.
    """

    run: str
    stage: str
    preset: str
    prediction_type: str
    resolution: int
    license: str | None
    data_digest: str
    data_digest_covers: str
    bundle: str | None
    commit: str | None
    prompts: tuple[str, ...]
    base_model: str | None
    data: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    components: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data, for a components folder's manifest."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> TrainingRecord:
        """Return the record of :meth:`as_dict`."""
        return cls(**{**document, "prompts": tuple(document["prompts"])})


def bundle_variables() -> tuple[str | None, str | None]:
    """Return digest and commit of this job's bundle; None where the environment lacks them."""
    return os.environ.get(BUNDLE_VARIABLE), os.environ.get(COMMIT_VARIABLE)


def model_card(
    record: TrainingRecord,
    *,
    pipeline_class: str,
    standard: bool,
    absent: Sequence[str] = (),
    step: int,
    weights: str,
    has_grid: bool,
    adapter: str | None = None,
) -> str:
    """Return the card of the model after optimizer ``step``.

    ``weights`` is ``ema`` or ``raw``. ``standard`` is whether ``pipeline_class`` is diffusers' own,
    ``absent`` the components that it needs to be passed as None. ``adapter`` is the line of Python
    that loads an adapter, None for a model.
    """
    title = f"{record.run}, {record.stage}"
    lines = [*_front_matter(record, is_adapter=adapter is not None), "", f"# {title}", ""]
    kind = "text-to-image model" if adapter is None else "LoRA adapter of a text-to-image model"
    lines += [f"A `{record.preset}` {kind}, trained with sm-train."]
    if has_grid:
        lines += ["", f"![Samples of the prompts below]({GRID_FILE})"]
    lines += [
        "",
        *(
            _usage(pipeline_class, standard, absent)
            if adapter is None
            else _adapter_usage(record, adapter)
        ),
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value} |" for name, value in _facts(record, step, weights)]
    for channel, rows in record.data.items():
        lines += ["", f"## Data of the channel `{channel}`", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {text} |" for name, text in rows]
    if record.prompts:
        lines += ["", "## Prompts of the samples", ""]
        lines += [f"{number}. {_inline(text)}" for number, text in enumerate(record.prompts, 1)]
    return "\n".join(lines) + "\n"


def _front_matter(record: TrainingRecord, *, is_adapter: bool) -> list[str]:
    """Return the card's metadata as YAML; JSON strings are valid YAML."""
    base = [f"base_model: {json.dumps(record.base_model)}"] if record.base_model else []
    return [
        "---",
        f"license: {json.dumps(record.license or UNKNOWN_LICENSE)}",
        *base,
        "library_name: diffusers",
        "pipeline_tag: text-to-image",
        "tags:",
        "- text-to-image",
        "- diffusers",
        "- sm-train",
        *(["- lora"] if is_adapter else []),
        "---",
    ]


def _usage(pipeline_class: str, standard: bool, absent: Sequence[str]) -> list[str]:
    argument = "" if standard else ", trust_remote_code=True"
    argument += "".join(f", {name}=None" for name in absent)
    note = f"diffusers' `{pipeline_class}`" if standard else "the class in `pipeline.py`"
    return [
        f"The folder opens as {note}:",
        "",
        "```python",
        "from diffusers import DiffusionPipeline",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained(folder{argument})",
        'image = pipeline("a photograph of a lighthouse").images[0]',
        "```",
    ]


def _adapter_usage(record: TrainingRecord, adapter: str) -> list[str]:
    base = "BASE_MODEL" if record.base_model is None else json.dumps(record.base_model)
    imports = ["import peft"] if "peft." in adapter else []
    return [
        "The adapter extends the model that it was trained from:",
        "",
        "```python",
        *imports,
        "from diffusers import DiffusionPipeline",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained({base})",
        adapter,
        'image = pipeline("a photograph of a lighthouse").images[0]',
        "```",
    ]


def _facts(record: TrainingRecord, step: int, weights: str) -> Iterator[tuple[str, str]]:
    yield "run", f"`{record.run}`"
    yield "stage", f"`{record.stage}`, {record.resolution} px"
    averaged = "exponential moving average (EMA)" if weights == "ema" else "raw (not averaged)"
    yield "optimizer steps", f"{step:,} in this stage"
    yield "weights", averaged
    yield "predicts", f"`{record.prediction_type}`"
    for name, identity in record.components.items():
        yield f"tensors of `{name}`", f"`{describe_identity(identity)}`"
    yield "data digest", f"`{record.data_digest}`, of the {record.data_digest_covers}"
    yield "source bundle (SHA-256)", f"`{record.bundle}`" if record.bundle else "not recorded"
    yield "commit", f"`{record.commit}`" if record.commit else "not recorded"


def _inline(text: str) -> str:
    """Return a prompt as one line of Markdown code, whatever it contains."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, _runs_of_backticks(line)), default=0))
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def _runs_of_backticks(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split() if run]
