"""Validate requests against the service model that botocore ships.

botocore's own validator checks only types, required fields and minimum lengths. The model also has
maximum lengths, ranges, enumerations and patterns, and its documentation rules between fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import botocore.loaders
import botocore.model
import botocore.validate
import regex


@cache
def _shape(service: str, operation: str) -> Any:
    document = botocore.loaders.Loader().load_service_model(service, "service-2")
    return botocore.model.ServiceModel(document).operation_model(operation).input_shape


def shape_limits(name: str) -> dict[str, int]:
    """Return the ``min`` and ``max`` of a shape of the SageMaker service."""
    shape = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")["shapes"][name]
    return {key: shape[key] for key in ("min", "max")}


def request_errors(request: Any) -> list[str]:
    """Return everything that is wrong with a CreateTrainingJob request."""
    return field_errors("sagemaker", "CreateTrainingJob", request) or [*_rule_errors(request)]


def field_errors(service: str, operation: str, request: Any) -> list[str]:
    """Return what is wrong with each field of a request alone."""
    shape = _shape(service, operation)
    report = botocore.validate.ParamValidator().validate(request, shape)
    if report.has_errors():
        return [report.generate_report()]
    return [*_limit_errors(request, shape, "request")]


def _limit_errors(value: Any, shape: Any, path: str) -> Iterator[str]:
    bounds = shape.metadata
    size = value if shape.type_name in ("integer", "long") else None
    if shape.type_name in ("list", "map", "string"):
        size = len(value)
    if size is not None and not bounds.get("min", size) <= size <= bounds.get("max", size):
        yield f"{path}: {size} is not in {bounds}"
    if shape.type_name == "structure":
        for name, item in value.items():
            yield from _limit_errors(item, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "list":
        for index, item in enumerate(value):
            yield from _limit_errors(item, shape.member, f"{path}[{index}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _limit_errors(key, shape.key, f"{path} key")
            yield from _limit_errors(item, shape.value, f"{path}.{key}")
    elif shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            yield f"{path}: {value!r} is not one of {shape.enum}"
        # The service uses Java's \d, which matches ASCII digits only.
        pattern = bounds.get("pattern", "(?s).*").replace(r"\d", "[0-9]")
        if not regex.fullmatch(pattern, value):
            yield f"{path}: {value!r} does not match {pattern}"


def _rule_errors(request: Any) -> Iterator[str]:
    """Check the rules between fields that the model's documentation states (botocore 1.44.5)."""
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    spot = request.get("EnableManagedSpotTraining", False)
    preferences = resources.get("InstancePreferences")
    if preferences is not None:
        names = [preference["InstanceType"] for preference in preferences]
        counts = [preference.get("InstanceCount") for preference in preferences]
        if "InstanceType" in resources or spot or "InstancePlacementConfig" in resources:
            yield "InstancePreferences are incompatible with InstanceType, placement and spot"
        if len(set(names)) < len(names):
            yield "a type appears twice among InstancePreferences"
        has_counts = all(count is not None for count in counts)
        if ("InstanceCount" in resources) == has_counts or (not has_counts and any(counts)):
            yield "InstanceCount must be given once, or for each preference"
    elif not {"InstanceType", "InstanceCount"} <= resources.keys():
        yield "InstanceType or InstanceCount is missing"
    if spot != ("MaxWaitTimeInSeconds" in stopping):
        yield "spot requires MaxWaitTimeInSeconds, and only spot may have it"
    if stopping.get("MaxWaitTimeInSeconds", 10**9) < stopping["MaxRuntimeInSeconds"]:
        yield "MaxWaitTimeInSeconds is less than MaxRuntimeInSeconds"
    if stopping["MaxRuntimeInSeconds"] > 28 * 86400:
        yield "MaxRuntimeInSeconds is over 28 days"
    channels = [channel["ChannelName"] for channel in request["InputDataConfig"]]
    if len(set(channels)) < len(channels):
        yield "duplicate channel name"
    keys = [tag["Key"] for tag in request["Tags"]]
    if len(set(keys)) < len(keys) or any(key.lower().startswith("aws:") for key in keys):
        yield "duplicate tag, or one that is reserved for AWS"
