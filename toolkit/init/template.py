"""Fills a commented run file with the user's values; comments and their columns stay."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

import yaml
from sm_train.cost.instances import USABLE_MEMORY, UnknownInstanceTypeError, instance_type
from sm_train.estimators.config.consistency import KeyPath
from sm_train.estimators.config.fields import (
    CONTAINER_IMAGE_PATTERN,
    LABEL_KEY_PATTERN,
    NAME_PATTERN,
    S3_URI_PATTERN,
    pattern_message,
)
from sm_train.estimators.config.load import RunFileError, dotted, load_document
from sm_train.estimators.config.presets import (
    preset_names,
    preset_prediction_types,
    unknown_preset,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.settings import require_valid
from sm_train.toolkit.memory.memory_fit import smallest_change, stages_over
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.run_file.placeholders import find_placeholders

_ACCOUNT, _BUCKET, _REGION = "111122223333", "my-bucket", "us-east-1"
RDMA_RESOURCE = "rdma/hca_shared_devices_a"
"""The values in the templates; the resource is that of the RDMA shared device plugin by default."""


@dataclass(frozen=True)
class Values:
    """The user's values; None keeps that of the template."""

    name: str | None = None
    region: str | None = None
    role: str | None = None
    bucket: str | None = None
    data: str | None = None
    model: str | None = None
    instance_type: str | None = None
    instances: int | None = None
    image: str | None = None
    rdma_resource: str | None = None


_PATTERNS = {
    "name": NAME_PATTERN,
    "data": S3_URI_PATTERN,
    "image": CONTAINER_IMAGE_PATTERN,
    "rdma_resource": LABEL_KEY_PATTERN,
}


def read_template(preset: str) -> str:
    """Return the commented run file of ``preset``."""
    return (files("sm_train.toolkit") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")


def require_valid_value(option: str, value: Any) -> None:
    """Refuse a value of ``option``, a field of :class:`Values`, that no run file would accept.

    Raises:
        UserError: the value is not valid.
    """
    source = f"--{option.replace('_', '-')}"
    if option in ("region", "role", "bucket"):
        require_valid(option, value, source)
        return
    problem = None
    if option in _PATTERNS:
        pattern = _PATTERNS[option]
        problem = None if re.fullmatch(pattern, value) else pattern_message(pattern)
    elif option == "model" and value not in preset_names():
        problem = unknown_preset(value)
    elif option == "instance_type":
        try:
            instance_type(value)
        except UnknownInstanceTypeError as error:
            raise UserError(f"{source}: {error}") from None
    if problem:
        raise UserError(f"{source}: {value!r} {problem}")


def fill(text: str, values: Values) -> str:
    """Return the run file ``text`` with ``values``.

    Raises:
        UserError: a value is not valid, or the GPUs cannot keep a stage's effective batch size.
    """
    for field in fields(values):
        if getattr(values, field.name) is not None:
            require_valid_value(field.name, getattr(values, field.name))
    bucket = values.bucket or (values.data.split("/")[2] if values.data else None)
    edits: dict[KeyPath, object] = {("name",): values.name, ("data", "uri"): values.data}
    edits |= {("role",): values.role, ("bucket",): values.bucket}
    edits |= _kubernetes_edits(text, values)
    edits |= _model_edits(values.model)
    edits |= _cluster_edits(text, values)
    for path, value in edits.items():
        if value is not None:
            text = _set(text, path, str(value))
    if values.model is not None or values.instance_type is not None:
        text = _fitted(text)
    if values.role:
        text = text.replace(_ACCOUNT, values.role.split(":")[4])
        text = text.replace(": replace with yours", "")
    if bucket:
        text = re.sub(rf"\b{_BUCKET}\b", bucket, text)
    return text.replace(_REGION, values.region) if values.region else text


def placeholders_in(text: str, source: str) -> list[str]:
    """Return the keys that still hold values of documentation.

    Raises:
        UserError: the run file is not valid.
    """

    try:
        config: RunConfig = load_document(yaml.safe_load(text), (), source)
    except RunFileError as error:
        raise UserError(str(error)) from None
    return list(
        dict.fromkeys(dotted(placeholder.path) for placeholder in find_placeholders(config))
    )


def _kubernetes_edits(text: str, values: Values) -> dict[KeyPath, object]:
    """Return the edits for Kubernetes.

    Raises:
        UserError: the template is not for Kubernetes.
    """
    edits: dict[KeyPath, object] = {}
    if values.image is not None:
        edits["kubernetes", "image"] = values.image
    if values.rdma_resource is not None:
        edits["kubernetes", "network", "resources"] = f"{{{values.rdma_resource}: 1}}"
    if edits and "kubernetes" not in yaml.safe_load(text):
        option = "--image" if values.image is not None else "--rdma-resource"
        raise UserError(
            f"{option}: the run file has no section kubernetes; use it with --preset infiniband-20b"
        )
    return edits


def _model_edits(model: str | None) -> dict[KeyPath, object]:
    if model is None:
        return {}
    supported = preset_prediction_types(model)
    kept = "v_prediction" if "v_prediction" in supported else supported[0]
    return {("model", "preset"): model, ("model", "prediction_type"): kept}


def _cluster_edits(text: str, values: Values) -> dict[KeyPath, object]:
    """Return the edits for another cluster, on which each stage keeps its effective batch size."""
    if values.instance_type is None and values.instances is None:
        return {}
    run = yaml.safe_load(text)
    if values.instances is not None and len(run["stages"]) > 1:
        raise UserError(
            f"--instances: the run file has {len(run['stages'])} stages of different sizes; edit "
            "their instances"
        )
    chosen = instance_type(values.instance_type or run["cluster"]["instance_type"])
    edits: dict[KeyPath, object] = {("cluster", "instance_type"): values.instance_type}
    if run["cluster"].get("backend") == "smddp" and not chosen.supports_smddp:
        edits["cluster", "backend"] = "auto  # NCCL (over EFA); smddp needs p4d or p4de"
    for index, stage in enumerate(run["stages"]):
        instances = values.instances or stage["instances"]
        gpus = instances * chosen.accelerators
        per_gpu, accumulation = _split_batch(stage, gpus)
        where: KeyPath = ("stages", index)
        edits[(*where, "instances")] = instances
        edits[(*where, "per_device_batch_size")] = per_gpu
        if "gradient_accumulation_steps" in stage:
            edits[(*where, "gradient_accumulation_steps")] = accumulation
        edits[(*where, "effective_batch_size")] = _checked(
            stage["effective_batch_size"], per_gpu, accumulation, gpus
        )
    return edits


def _fitted(text: str) -> str:
    """Return the run file with the smallest changes by which each stage fits in GPU memory.

    A stage that no change makes fit stays as it is: `check` reports it.
    """
    config = with_sharding(load_document(yaml.safe_load(text), (), "the template"))
    kind = instance_type(config.cluster.instance_type)
    if kind.accelerator_memory_gib is None:
        return text
    for index, stage, _ in stages_over(config, USABLE_MEMORY * kind.accelerator_memory_gib):
        change = smallest_change(config, stage) or {}
        where: KeyPath = ("stages", index)
        for key, value in change.items():
            text = _set(text, (*where, key), str(value).lower())
        if "per_device_batch_size" in change:
            product = _checked(
                stage.effective_batch_size,
                change["per_device_batch_size"],
                change["gradient_accumulation_steps"],
                stage.instances * kind.accelerators,
            )
            text = _set(text, (*where, "effective_batch_size"), product)
    return text


def _checked(batch: object, per_gpu: int, accumulation: int, gpus: int) -> str:
    """Return an effective batch size with its factors in a comment."""
    return f"{batch}  # {per_gpu} per GPU × {accumulation} accumulation steps × {gpus} GPUs"


def _split_batch(stage: dict[str, Any], gpus: int) -> tuple[int, int]:
    """Return images per GPU, at most the template's, and accumulation steps.

    Raises:
        UserError: no number of images per GPU gives the effective batch size.
    """
    batch, most = stage["effective_batch_size"], stage["per_device_batch_size"]
    accumulates = "gradient_accumulation_steps" in stage
    for per_gpu in range(most, 0, -1):
        steps, rest = divmod(batch, per_gpu * gpus)
        if rest == 0 and (steps == 1 or accumulates):
            return per_gpu, steps
    raise UserError(
        f"--instances: {gpus} GPUs do not divide the effective batch of {batch} images in stage "
        f"{stage['name']}; choose another number, or edit effective_batch_size"
    )


def _set(text: str, path: KeyPath, value: str) -> str:
    """Replace the value at ``path``; a key that is in a comment is taken out of it."""
    node: yaml.Node | None = yaml.compose(text)
    section = 0
    for key in path:
        section = node.start_mark.index if node is not None else section
        if isinstance(node, yaml.SequenceNode):
            node = node.value[int(key)]
        elif isinstance(node, yaml.MappingNode):
            node = next((child for name, child in node.value if name.value == key), None)
    if node is not None:
        start, end = node.start_mark.index, node.end_mark.index
        return _replace(text, start, end, value)
    commented = re.compile(rf"^ *(# {path[-1]}: \S+)", re.MULTILINE).search(text, section)
    if commented is None:
        raise LookupError(f"{path}: not in the template")
    return _replace(text, commented.start(1), commented.end(1), f"{path[-1]}: {value}")


def _replace(text: str, start: int, end: int, value: str) -> str:
    """Replace a part of a line; a comment after it keeps its column if there is room for it.

    A comment in ``value`` replaces that of the line.
    """
    line_end = text.index("\n", end)
    rest = text[end:line_end]
    comment = rest.lstrip()
    value, has_own, own = value.partition("  # ")
    if has_own:
        comment = f"# {own}"
    if comment.startswith("#"):
        padding = len(rest) - len(rest.lstrip()) + (end - start) - len(value)
        rest = " " * max(2, padding) + comment
    return text[:start] + value + rest + text[line_end:]
