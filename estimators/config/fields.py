"""The kinds of values that a run file holds: their bounds, their patterns, and these in words.

Every pattern is at least as narrow as botocore's own for the field that it ends up in.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from sm_train.cost.durations import duration_seconds

JOB_NAME_LIMIT = 63  # botocore's service model, TrainingJobName

CHANNEL_LIMIT = 20
OWN_CHANNELS = (
    "train",
    "index",
    "validation",
    "model",
    "previous",
    "previous_state",
    "code",
    "sm_drivers",
)
"""Channels that a request may have beside the user's own (estimators.request)."""


def _seconds(value: Any) -> Any:
    """Read ``90s``, ``30m``, ``36h`` or ``5d`` as seconds; a number is seconds already."""
    if not isinstance(value, str):
        return value
    found = duration_seconds(value)
    if found is None:
        raise ValueError("write a duration such as 90s, 30m, 36h or 5d")
    return round(found)


def no_bool(value: Any) -> Any:
    """YAML's ``yes`` and ``true`` are no numbers, though Python would count with them."""
    if isinstance(value, bool):
        raise ValueError("write a number")
    return value


Duration = Annotated[
    int,
    BeforeValidator(_seconds, json_schema_input_type=int | str),
    Field(description="Seconds, or a number with s, m, h or d behind it."),
]
Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1)]
Positive = Annotated[float, BeforeValidator(no_bool), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(no_bool), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(no_bool), Field(ge=0, lt=1, allow_inf_nan=False)]

# A quote breaks the container's start-up script, a line end breaks its environment file.
_PLAIN = r"^[^'\"\\\x00-\x1f\x7f]*$"
_NAME = r"^[a-zA-Z0-9](-?[a-zA-Z0-9])*$"
_S3_URI = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^'\"\\\x00-\x1f\x7f]*)?$"
_VARIABLE = r"^[a-zA-Z_][a-zA-Z0-9_]*$"
_VERSION = r"^[0-9]+\.[0-9]+(\.[0-9]+)?$"
_REGION = r"^[a-z]{2}(-[a-z]+)+-[0-9]$"
_ROLE = r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/-]+$"
_BUCKET = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
_VPC_ID = r"^[a-zA-Z0-9-]{1,32}$"
_IMAGE = r"^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$"
_KMS_KEY = r"^[a-zA-Z0-9:/_-]+$"
_PLAN = r"^arn:aws[a-z-]*:sagemaker:[a-z]{2}(-[a-z]+)+-[0-9]:[0-9]{12}:training-plan/[a-zA-Z0-9-]+$"
# Narrower than the service's: the SDK's start script makes a shell variable of the name.
_CHANNEL = r"^[a-zA-Z0-9_]+$"
_ENTRY = r"^[a-zA-Z0-9_]([a-zA-Z0-9_/-]*[a-zA-Z0-9_-])?\.py$"

# No colon but ssm: and an ARN's, so no address: a run file is no place for one.
SECRET = (
    r"^(ssm:|arn:aws[a-z-]*:(secretsmanager|ssm):[a-z0-9-]+:[0-9]{12}:[a-zA-Z0-9_]+[:/])?"
    r"[a-zA-Z0-9_/+=.@-]+$"
)
TOPIC = r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[a-zA-Z0-9_-]+$"

_PATTERN_WORDS = {
    _PLAIN: "must be without quotes, backslashes, line ends and control characters",
    _NAME: "must be letters and digits with single hyphens between them",
    _S3_URI: "must be an address such as s3://bucket/prefix/, without quotes",
    _VARIABLE: "must be letters, digits and underscores, not beginning with a digit",
    _VERSION: "must be a version such as 2.3.0",
    _REGION: "must be a region such as us-east-1",
    _ROLE: "must be a role's ARN such as arn:aws:iam::111122223333:role/sm-train",
    _BUCKET: "must be a bucket's name, without s3://",
    _VPC_ID: "must be an id such as subnet-0123abcd or sg-0123abcd",
    _IMAGE: "must be an image such as 111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1",
    _KMS_KEY: "must be a KMS key's id or ARN",
    _PLAN: "must be a plan's ARN: arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
    _CHANNEL: "must be letters, digits and underscores",
    SECRET: "must be the name of a secret, or ssm: and a parameter's name; never the address",
    TOPIC: "must be a topic's ARN such as arn:aws:sns:us-east-1:111122223333:sm-train",
    _ENTRY: "must be a Python file's path below code, such as train.py",
}


def words_for_pattern(pattern: str) -> str:
    """What a pattern of this module's types asks for, in words."""
    return _PATTERN_WORDS[pattern]


def _tag_text(value: str) -> str:
    """What AWS allows in a tag, by Unicode category: letters, separators, numbers and a few signs.

    Source: pattern of ``TagKey`` and ``TagValue`` in botocore's service model.
    """
    for sign in value:
        if unicodedata.category(sign)[0] not in "LZN" and sign not in "_.:/=+-@":
            raise ValueError(f"holds {sign!r}; a tag is letters, digits, spaces and _.:/=+-@")
    return value


def _own_tag(value: str) -> str:
    for prefix, owner in (("aws:", "AWS"), ("sm-train:", "sm-train")):
        if value.lower().startswith(prefix):
            raise ValueError(f"begins with {prefix}, which is {owner}'s own; name it otherwise")
    return value


def _own_channel(value: str) -> str:
    if value in OWN_CHANNELS:
        raise ValueError("is a channel of sm-train's; name yours otherwise")
    return value


PlainText = Annotated[str, Field(pattern=_PLAIN, max_length=256)]
Name = Annotated[str, Field(pattern=_NAME, max_length=JOB_NAME_LIMIT)]
PromptText = Annotated[str, Field(min_length=1, max_length=1000)]
# 1,024 in the service; an index beside the shards has a name of its own to add.
S3Uri = Annotated[str, Field(pattern=_S3_URI, max_length=1000)]
Region = Annotated[str, Field(pattern=_REGION, max_length=32)]
Role = Annotated[str, Field(pattern=_ROLE, max_length=2048)]
Bucket = Annotated[str, Field(pattern=_BUCKET)]
VpcId = Annotated[str, Field(pattern=_VPC_ID)]
Image = Annotated[str, Field(pattern=_IMAGE, max_length=255)]
Version = Annotated[str, Field(pattern=_VERSION, max_length=20)]
KmsKey = Annotated[str, Field(pattern=_KMS_KEY, max_length=2048)]
TrainingPlan = Annotated[str, Field(pattern=_PLAN, max_length=2048)]
ChannelName = Annotated[str, Field(pattern=_CHANNEL, max_length=64), AfterValidator(_own_channel)]
EntryScript = Annotated[str, Field(pattern=_ENTRY, max_length=200)]
TagKey = Annotated[
    str, Field(min_length=1, max_length=128), AfterValidator(_tag_text), AfterValidator(_own_tag)
]
TagValue = Annotated[str, Field(max_length=256), AfterValidator(_tag_text)]
SecretName = Annotated[str, Field(pattern=SECRET, max_length=512)]
Topic = Annotated[str, Field(pattern=TOPIC)]
VariableName = Annotated[str, Field(pattern=_VARIABLE, max_length=512)]
VariableValue = Annotated[str, Field(pattern=_PLAIN, max_length=512)]


class Section(BaseModel):
    """A mapping of the run file: unknown keys are errors, values do not change."""

    # Built at the first use: a section is built once, inside the run that holds it.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
