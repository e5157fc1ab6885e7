"""What SageMaker would refuse of a request, by the service model that botocore ships.

botocore's own validator looks at types, required fields and least lengths only; the model also has
greatest lengths, ranges, enumerations and patterns, and its documentation has rules between fields.
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


def refusals(request: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a CreateTrainingJob request."""
    return bad_fields("sagemaker", "CreateTrainingJob", request) or [*_rules(request)]


def bad_fields(service: str, operation: str, request: dict[str, Any]) -> list[str]:
    """What the service model refuses of a request, each field by itself."""
    shape = _shape(service, operation)
    report = botocore.validate.ParamValidator().validate(request, shape)
    if report.has_errors():
        return [report.generate_report()]
    return [*_limits(request, shape, "request")]


def _limits(value: Any, shape: Any, place: str) -> Iterator[str]:
    bounds = shape.metadata
    size = value if shape.type_name in ("integer", "long") else None
    if shape.type_name in ("list", "map", "string"):
        size = len(value)
    if size is not None and not bounds.get("min", size) <= size <= bounds.get("max", size):
        yield f"{place}: {size} is not in {bounds}"
    if shape.type_name == "structure":
        for name, item in value.items():
            yield from _limits(item, shape.members[name], f"{place}.{name}")
    elif shape.type_name == "list":
        for index, item in enumerate(value):
            yield from _limits(item, shape.member, f"{place}[{index}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _limits(key, shape.key, f"{place} key")
            yield from _limits(item, shape.value, f"{place}.{key}")
    elif shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            yield f"{place}: {value!r} is none of {shape.enum}"
        # Java's \d, which the service matches by, is ASCII's.
        pattern = bounds.get("pattern", "(?s).*").replace(r"\d", "[0-9]")
        if not regex.fullmatch(pattern, value):
            yield f"{place}: {value!r} does not match {pattern}"


def _rules(request: dict[str, Any]) -> Iterator[str]:
    """The rules between fields that the model states in words (botocore 1.44.5)."""
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    spot = request.get("EnableManagedSpotTraining", False)
    preferences = resources.get("InstancePreferences")
    if preferences is not None:
        names = [one["InstanceType"] for one in preferences]
        counts = [one.get("InstanceCount") for one in preferences]
        if "InstanceType" in resources or spot or "InstancePlacementConfig" in resources:
            yield "InstancePreferences exclude InstanceType, placement and spot"
        if len(set(names)) < len(names):
            yield "a type appears twice among InstancePreferences"
        each = all(count is not None for count in counts)
        if ("InstanceCount" in resources) == each or (not each and any(counts)):
            yield "instance counts are for all preferences or beside each"
    elif not {"InstanceType", "InstanceCount"} <= resources.keys():
        yield "no machines"
    if spot != ("MaxWaitTimeInSeconds" in stopping):
        yield "spot and MaxWaitTimeInSeconds go together"
    if stopping.get("MaxWaitTimeInSeconds", 10**9) < stopping["MaxRuntimeInSeconds"]:
        yield "MaxWaitTimeInSeconds is less than MaxRuntimeInSeconds"
    if stopping["MaxRuntimeInSeconds"] > 28 * 86400:
        yield "MaxRuntimeInSeconds is over 28 days"
    channels = [channel["ChannelName"] for channel in request["InputDataConfig"]]
    if len(set(channels)) < len(channels):
        yield "two channels of one name"
    keys = [tag["Key"] for tag in request["Tags"]]
    if len(set(keys)) < len(keys) or any(key.lower().startswith("aws:") for key in keys):
        yield "two tags of one name, or one that is AWS's own"
