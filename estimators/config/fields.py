"""Field types of the run file: bounds, patterns, and the message for each pattern.

Every pattern is at least as narrow as botocore's pattern for the request field that it fills.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from sm_train.cost.durations import duration_seconds
from sm_train.cost.instances import OWN_PATTERN
from sm_train.entrypoints.job_interface import job_config as entry_arguments
from sm_train.estimators.regions import region_problem

T = TypeVar("T")

MAX_JOB_NAME = 63
"""Longest name of a training job (TrainingJobName in botocore's service model)."""

MAX_CHANNELS = 20
RESERVED_CHANNELS = (
    "train",
    "index",
    "validation",
    "model",
    "previous",
    "previous_state",
    "code",
    "sm_drivers",
)
"""Channels that a request may add to the user's (estimators/request/training_request.py)."""


def _parse_duration(value: T) -> T | int:
    """Convert ``90s``, ``30m``, ``36h`` or ``5d`` to seconds; numbers pass unchanged."""
    if not isinstance(value, str):
        return value
    seconds = duration_seconds(value)
    if seconds is None:
        raise ValueError("write a duration such as 90s, 30m, 36h or 5d")
    return round(seconds)


def reject_bool(value: T) -> T:
    """Refuse YAML's ``yes`` and ``true``, which pydantic would take for the number 1."""
    if isinstance(value, bool):
        raise ValueError("write a number")
    return value


Duration = Annotated[
    int,
    BeforeValidator(_parse_duration, json_schema_input_type=int | str),
    Field(description="Seconds, or a number followed by s, m, h or d."),
]
PositiveInt = Annotated[int, BeforeValidator(reject_bool), Field(ge=1)]
NonNegativeInt = Annotated[int, BeforeValidator(reject_bool), Field(ge=0)]
PositiveFloat = Annotated[float, BeforeValidator(reject_bool), Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, lt=1, allow_inf_nan=False)]

# A quote breaks the container's start script, a line break its environment file.
_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"
_PLAIN = r"^[^'\"\\\x00-\x1f\x7f]*$"
NAME_PATTERN = r"^[a-zA-Z0-9](-?[a-zA-Z0-9])*$"
S3_URI_PATTERN = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^'\"\\\x00-\x1f\x7f]*)?$"
_VARIABLE = r"^[a-zA-Z_][a-zA-Z0-9_]*$"
_VERSION = r"^[0-9]+\.[0-9]+(\.[0-9]+)?$"
_REGION = r"^[a-z]{2,4}(-[a-z]+)+-[0-9]$"
ROLE_PATTERN = r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/-]+$"
BUCKET_PATTERN = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
_BUCKET_OWNER = r"^([0-9]{12}|any)$"
_VPC_ID = r"^[a-zA-Z0-9-]{1,32}$"
_IMAGE = r"^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$"
_KMS_KEY = r"^[a-zA-Z0-9:/_-]+$"
_PLAN = r"^arn:aws[a-z-]*:sagemaker:[a-z]{2}(-[a-z]+)+-[0-9]:[0-9]{12}:training-plan/[a-zA-Z0-9-]+$"
_LAMBDA = r"^arn:aws[a-z-]*:lambda:[a-z0-9-]+:[0-9]{12}:function:[a-zA-Z0-9_:-]+$"
_PACKAGE_INDEX = (
    r"^(https://[^\s@'\"\\]+"
    r"|arn:aws[a-z-]*:codeartifact:[a-z0-9-]+:[0-9]{12}:repository/[a-z0-9-]+/[A-Za-z0-9._-]+)$"
)
_FILE_SYSTEM = r"^fs-[0-9a-f]{8,}$"
_DIRECTORY = r"^/[^'\"\\\x00-\x1f\x7f]*$"
# Narrower than the service's pattern: the SDK's start script makes a shell variable of the name.
_CHANNEL = r"^[a-zA-Z0-9_]+$"
_FUNCTION = r"^[a-z0-9]+$|^[a-zA-Z_][a-zA-Z0-9_.]*:[a-zA-Z_][a-zA-Z0-9_.]*$"
_ENTRY = r"^[a-zA-Z0-9_]([a-zA-Z0-9_/-]*[a-zA-Z0-9_-])?\.py$"
_EXTENSION = r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$"
_FIELD_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
_JSON_FIELD = r"^[^.\s\[\]]+(\.[^.\s\[\]]+|\[[0-9]+\])*$"
_LICENSE = r"^[a-z0-9][a-z0-9.+-]*$"
_LAYER = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$"

# Colons are allowed only in ssm: and in an ARN, so a pasted URL (the secret itself) is refused.
SECRET_PATTERN = (
    r"^(ssm:|arn:aws[a-z-]*:(secretsmanager|ssm):[a-z0-9-]+:[0-9]{12}:[a-zA-Z0-9_]+[:/])?"
    r"[a-zA-Z0-9_/+=.@-]+$"
)
TOPIC_PATTERN = r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[a-zA-Z0-9_-]+$"

RESOURCE_NAME_PATTERN = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
LABEL_KEY_PATTERN = (
    r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$"
)
LABEL_VALUE_PATTERN = r"^[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?$"
CONTAINER_IMAGE_PATTERN = r"^[a-zA-Z0-9][a-zA-Z0-9._:/@#+-]*$"
SLURM_IMAGE_PATTERN = r"^(/[a-zA-Z0-9_./+-]+|[a-zA-Z0-9][a-zA-Z0-9._:/@#+-]*)$"
INTERFACE_PATTERN = r"^[A-Za-z0-9_.:-]{1,32}$"
ATTACHMENT_PATTERN = r"^([a-z0-9-]+/)?[a-z0-9.-]+(@[a-z0-9]+)?$"
SECRET_KEY_PATTERN = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[a-zA-Z0-9._-]+$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
_SHELL_PATH = r"^[a-zA-Z0-9_./-]+$"

PROJECT_PATTERN = r"^[^/\\#?%:\x00-\x1f]+$"
"""A name that W&B accepts as a project; MLflow accepts it as an experiment."""

SERVER_PATTERN = r"^https?://[^\s]+$"
MLFLOW_PATTERN = (
    r"^(https?://[^\s]+"
    r"|arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:mlflow-(?:tracking-server|app)/[A-Za-z0-9-]+)$"
)
SCHEDULE_PATTERN = (
    r"^([0-9*,/-]+( [0-9A-Za-z*,/-]+){4}|@(yearly|annually|monthly|weekly|daily|midnight|hourly))$"
)
SLURM_NAME_PATTERN = r"^[a-z][a-z0-9-]*$"
MODULE_PATTERN = r"^[a-zA-Z0-9_./+-]+$"

_PATTERN_MESSAGES = {
    _ONE_LINE: "must be one line without control characters",
    _PLAIN: "must not contain quotes, backslashes, line breaks or control characters",
    NAME_PATTERN: "must be letters and digits with single hyphens between them",
    S3_URI_PATTERN: "must be an S3 URI such as s3://bucket/prefix/, without quotes",
    _VARIABLE: "must be letters, digits and underscores, and must not start with a digit",
    _VERSION: "must be a version such as 2.3.0",
    _REGION: "must be a region such as us-east-1",
    ROLE_PATTERN: "must be a role ARN such as arn:aws:iam::111122223333:role/sm-train",
    BUCKET_PATTERN: "must be a bucket name, without s3://",
    _BUCKET_OWNER: "must be an account of 12 digits, in quotes, or any",
    _VPC_ID: "must be an ID such as subnet-0123abcd or sg-0123abcd",
    _IMAGE: "must be an image such as 111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1",
    _KMS_KEY: "must be the ID or ARN of a KMS key",
    _PLAN: "must be a plan ARN: arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
    OWN_PATTERN: "must be a machine such as own.8xH100-SXM5-80GB.3200gbps.23.5usd",
    _LAMBDA: "must be the ARN of a Lambda function: arn:aws:lambda:REGION:ACCOUNT:function:NAME",
    _PACKAGE_INDEX: "must be an https:// address without a password, or the ARN of a CodeArtifact "
    "repository: arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/NAME",
    _FILE_SYSTEM: "must be the ID of a file system, such as fs-0123456789abcdef0",
    _DIRECTORY: "must be an absolute path, without quotes",
    _CHANNEL: "must be letters, digits and underscores",
    SECRET_PATTERN: "must be the name of a secret, or ssm: and the name of a parameter; "
    "never the URL itself",
    TOPIC_PATTERN: "must be a topic ARN such as arn:aws:sns:us-east-1:111122223333:sm-train",
    _FUNCTION: "must be a name from the list in `sm-train schema`, or module:function",
    _EXTENSION: "must be the file extension of a sample's file, such as txt or depth.npy",
    _FIELD_NAME: "must be a name of letters, digits and _",
    _JSON_FIELD: "must be a field such as alt_text, meta.title or texts[0]",
    _LICENSE: "must be an identifier such as apache-2.0, in lower case",
    _LAYER: "must be the name of a layer such as to_q or ff.net.2",
    RESOURCE_NAME_PATTERN: "must be a Kubernetes name: lowercase letters, digits, - and .",
    LABEL_KEY_PATTERN: "must be a label key such as team or example.com/team",
    LABEL_VALUE_PATTERN: "must be letters, digits, -, _ and ., with a letter or digit at both ends",
    CONTAINER_IMAGE_PATTERN: "must be an image such as registry.example.com/own:1",
    SECRET_KEY_PATTERN: "must be SECRET/KEY, the name of a Kubernetes secret and a key in it; "
    "never the value itself",
    SLURM_IMAGE_PATTERN: "must be an image, or the path of a squash file such as "
    "/fsx/images/train.sqsh",
    INTERFACE_PATTERN: "must be the name of an interface or adapter, such as eth0 or mlx5_0",
    ATTACHMENT_PATTERN: "must be NAME or NAMESPACE/NAME of a NetworkAttachmentDefinition",
    _QUANTITY: "must be a Kubernetes quantity such as 4, 500m or 64Gi",
    PROJECT_PATTERN: "must be a name without / \\ # ? % and :",
    SERVER_PATTERN: "must be an https:// address",
    MLFLOW_PATTERN: "must be an https:// address, or the ARN of a tracking server or MLflow app",
    SLURM_NAME_PATTERN: "must be the long name of an option of sbatch, such as partition",
    SCHEDULE_PATTERN: "must be a schedule of cron, such as */2 * * * * or @hourly",
    MODULE_PATTERN: "must be the name of a module, such as cuda/12.8",
    _SHELL_PATH: "must be a path of letters, digits and _ . / -",
    _ENTRY: "must be the path of a Python file below code, such as train.py",
}


def pattern_message(pattern: str) -> str:
    """Return what a value must look like to match ``pattern``, as an error message."""
    return _PATTERN_MESSAGES[pattern]


def _check_tag_text(value: str) -> str:
    """Check that a tag holds letters, separators, numbers and ``_.:/=+-@`` only.

    Source: pattern of ``TagKey`` and ``TagValue`` in botocore's service model, which is by Unicode
    category.
    """
    for character in value:
        if unicodedata.category(character)[0] not in "LZN" and character not in "_.:/=+-@":
            raise ValueError(
                f"contains {character!r}; a tag is letters, digits, spaces and _.:/=+-@"
            )
    return value


def _check_tag_prefix(value: str) -> str:
    for prefix, owner in (("aws:", "AWS"), ("sm-train:", "sm-train")):
        if value.lower().startswith(prefix):
            raise ValueError(f"starts with {prefix}, which is reserved for {owner}; rename the tag")
    return value


def _check_channel_name(value: str) -> str:
    if value in RESERVED_CHANNELS:
        raise ValueError("is a channel name reserved for sm-train; rename the channel")
    return value


def _check_region(value: T) -> T:
    problem = region_problem(value) if isinstance(value, str) else None
    if problem:
        raise ValueError(problem)
    return value


def _number_to_text(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"is a truth value; write the script's own text in quotes: '{value}'")
    return str(value) if isinstance(value, (int, float)) else value


def _whole_number_to_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_argument(value: str) -> str:
    if "\0" in value:
        raise ValueError("contains a null character")
    for name in entry_arguments.placeholders(value):
        if not entry_arguments.is_known(name):
            known = ", ".join(f"{{{placeholder}}}" for placeholder in entry_arguments.PLACEHOLDERS)
            raise ValueError(
                f"has the unknown placeholder {{{name}}}; known are {known} and "
                f"{{channel.NAME}}; for the text itself write {{{{{name}}}}}"
            )
    return value


def _end_with_slash(uri: str) -> str:
    return uri if uri.endswith("/") else f"{uri}/"


def _end_folder_with_slash(uri: str) -> str:
    is_object = re.search(r"//[^/]+/(.*/)?[^/]+\.[a-zA-Z][a-zA-Z0-9]*$", uri)
    return uri if is_object else _end_with_slash(uri)


PlainText = Annotated[str, Field(pattern=_PLAIN, max_length=256)]
SqlText = Annotated[str, Field(pattern=_ONE_LINE, max_length=1000)]
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_JOB_NAME)]
PromptText = Annotated[str, Field(min_length=1, max_length=1000)]
# The service takes 1,024; the file name of the index is appended to the prefix.
S3Folder = Annotated[
    str, Field(pattern=S3_URI_PATTERN, max_length=1000), AfterValidator(_end_with_slash)
]
"""An S3 prefix of SageMaker is a string: without the slash, ``data`` also matches ``data-old/``."""
S3FolderOrObject = Annotated[
    str, Field(pattern=S3_URI_PATTERN, max_length=1000), AfterValidator(_end_folder_with_slash)
]
"""An object if its last part has a file extension, otherwise a folder."""
Region = Annotated[str, BeforeValidator(_check_region), Field(pattern=_REGION, max_length=32)]
Role = Annotated[str, Field(pattern=ROLE_PATTERN, max_length=2048)]
Bucket = Annotated[str, Field(pattern=BUCKET_PATTERN)]
BucketOwner = Annotated[str, Field(pattern=_BUCKET_OWNER)]
VpcId = Annotated[str, Field(pattern=_VPC_ID)]
Image = Annotated[str, Field(pattern=_IMAGE, max_length=255)]
Version = Annotated[str, Field(pattern=_VERSION, max_length=20)]
KmsKey = Annotated[str, Field(pattern=_KMS_KEY, max_length=2048)]
TrainingPlan = Annotated[str, Field(pattern=_PLAN, max_length=2048)]
LambdaArn = Annotated[str, Field(pattern=_LAMBDA, max_length=2048)]
PackageIndex = Annotated[str, Field(pattern=_PACKAGE_INDEX, max_length=512)]
FileSystemId = Annotated[str, Field(pattern=_FILE_SYSTEM, max_length=21)]
DirectoryPath = Annotated[str, Field(pattern=_DIRECTORY, max_length=4096)]
ChannelName = Annotated[
    str, Field(pattern=_CHANNEL, max_length=64), AfterValidator(_check_channel_name)
]
EntryScript = Annotated[str, Field(pattern=_ENTRY, max_length=200)]
EntryArgument = Annotated[
    str, Field(max_length=10_000), BeforeValidator(_number_to_text), AfterValidator(_check_argument)
]
"""An argument of a script: text, or a number as written in YAML."""
MemberExtension = Annotated[str, Field(pattern=_EXTENSION, max_length=200)]
"""The extension of a file in a sample: all after the first dot of its name."""
FieldName = Annotated[str, Field(pattern=_FIELD_NAME, max_length=64)]
JsonField = Annotated[str, Field(pattern=_JSON_FIELD, max_length=200)]
FunctionName = Annotated[str, Field(pattern=_FUNCTION, max_length=200)]
License = Annotated[str, Field(pattern=_LICENSE, max_length=64)]
LayerName = Annotated[str, Field(pattern=_LAYER, max_length=200)]
TagKey = Annotated[
    str,
    Field(min_length=1, max_length=128),
    AfterValidator(_check_tag_text),
    AfterValidator(_check_tag_prefix),
]
TagValue = Annotated[str, Field(max_length=256), AfterValidator(_check_tag_text)]
SecretName = Annotated[str, Field(pattern=SECRET_PATTERN, max_length=512)]
TopicArn = Annotated[str, Field(pattern=TOPIC_PATTERN)]
VariableName = Annotated[str, Field(pattern=_VARIABLE, max_length=512)]
VariableValue = Annotated[str, Field(pattern=_PLAIN, max_length=512)]


Quantity = Annotated[
    str, BeforeValidator(_whole_number_to_text), Field(pattern=_QUANTITY, max_length=32)
]
"""An amount as Kubernetes writes it; YAML reads ``4`` as a number."""

_QUANTITY_UNITS = {
    "": 1.0,
    "m": 1e-3,
    **{unit: 1e3 ** (power + 1) for power, unit in enumerate("kMGT")},
    **{f"{unit}i": 2.0 ** (10 * (power + 1)) for power, unit in enumerate("KMGT")},
}


def quantity_bytes(quantity: str) -> float:
    """Return the bytes of a :data:`Quantity`, such as ``64Gi``."""
    number = quantity.rstrip("mkKMGTi")
    return float(number) * _QUANTITY_UNITS[quantity.removeprefix(number)]


ShellPath = Annotated[str, Field(pattern=_SHELL_PATH, max_length=1000)]


class Section(BaseModel):
    """A mapping of the run file: unknown keys are errors, instances are immutable."""

    # Pydantic builds a validator once, at first use: for the run that contains all sections.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def _job_struct(self, kind: type[T], **changes: Any) -> T:
        """Return what the job reads of this section: its fields of the same names.

        Lists become tuples. ``changes`` are the fields that differ from the run file's; fields that
        the section lacks keep their default.
        """
        values = changes
        for field in fields(kind):  # type: ignore[arg-type]
            if field.name not in changes and field.name in type(self).model_fields:
                value = getattr(self, field.name)
                values[field.name] = tuple(value) if isinstance(value, list) else value
        return kind(**values)
