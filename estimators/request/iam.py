"""The least that IAM must allow for a run: one policy for who submits it, one for its jobs' role.

What the laptop calls is recorded in tests and held against the first policy, both ways. What
SageMaker does with the role cannot be seen from here: the second follows the list in "SageMaker AI
Roles: CreateTrainingJob API: Execution Role Permissions" (SageMaker developer guide, 2026-11).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sm_train.estimators.config.naming import ROLE_NOT_SET, staging_bucket
from sm_train.estimators.config.placement import placements as run_places
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarms import alarm_prefix, rule_name, topic_name
from sm_train.estimators.request.images import image_uri

Policy = dict[str, Any]
"""An IAM policy document."""

_VERSION = "2012-10-17"
_LOGS = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True)
class _Places:
    """Where a run's things are: the account, the run's bucket and what is only read."""

    partition: str
    account: str
    region: str
    bucket: str
    read: tuple[str, ...]
    """S3 addresses that jobs read and the run does not write."""

    def arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    def s3(self, path: str) -> str:
        return f"arn:{self.partition}:s3:::{path}"

    @property
    def buckets(self) -> list[str]:
        names = {self.bucket, *(_path(uri).split("/")[0] for uri in self.read)}
        return [self.s3(name) for name in sorted(names)]


def policies(config: RunConfig, region: str, image: str) -> dict[str, Policy]:
    """``laptop`` submits and follows the run, ``job`` is its jobs' role, ``trust`` who takes it.

    ``image`` is the address, in ECR, that its jobs start from.

    Raises:
        ValueError: AWS has no image at one of the run's fallbacks.
    """
    places = _places(config, region)
    elsewhere = [
        (one.config, _places(one.config, one.region), image_uri(one.config, one.region))
        for one in run_places(config, region)[1:]
    ]
    laptop, job = _laptop(config, places, image), _job(config, places, image)
    for there in elsewhere:
        laptop = _joined(laptop, _laptop(*there))
        job = _joined(job, _job(*there))
    if elsewhere:
        # A large checkpoint is copied in parts; what cannot be finished is taken back.
        own = [statement for statement in laptop if statement["Sid"] == "StageAndFetch"]
        laptop.append(_allow("Move", ["s3:AbortMultipartUpload"], own[0]["Resource"]))
    return {
        "laptop": _policy(laptop),
        "job": _policy(job),
        "trust": _policy(
            [
                {
                    "Effect": "Allow",
                    "Principal": {"Service": "sagemaker.amazonaws.com"},
                    "Action": "sts:AssumeRole",
                    "Condition": {"StringEquals": {"aws:SourceAccount": places.account}},
                }
            ]
        ),
    }


def _joined(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The statements of two places, each with the resources of both."""
    joined = {statement["Sid"]: statement for statement in one}
    for statement in other:
        before = joined.get(statement["Sid"], statement)
        resources = dict.fromkeys([*before["Resource"], *statement["Resource"]])
        joined[statement["Sid"]] = before | {"Resource": list(resources)}
    return list(joined.values())


def _places(config: RunConfig, region: str) -> _Places:
    _, partition, _, _, account, _ = (config.role or ROLE_NOT_SET).split(":", 5)
    optional = (config.data.index_uri, config.data.validation, config.model.components)
    read = [
        config.data.uri,
        *filter(None, optional),
        *(one.uri for one in config.channels.values()),
    ]
    bucket = staging_bucket(config, region)
    return _Places(partition, account, region, bucket, tuple(read))


def _laptop(config: RunConfig, places: _Places, image: str) -> list[dict[str, Any]]:
    """What `submit`, `check` and `cost` call, and whoever looks after the jobs afterwards."""
    # SageMaker writes a job's name in lower case into its ARN.
    jobs = places.arn("sagemaker", f"training-job/{config.name.lower()}-*")
    role = config.role or ROLE_NOT_SET
    own = places.s3(f"{places.bucket}/{config.name}/*")
    index = [places.s3(_path(uri)) for uri in (config.data.index_uri,) if uri]
    statements = [
        _allow("Look", ["s3:ListBucket"], places.buckets),
        _allow("StageAndFetch", ["s3:GetObject", "s3:PutObject"], [own]),
        _allow(
            "Jobs",
            [
                "sagemaker:CreateTrainingJob",
                "sagemaker:AddTags",
                "sagemaker:DescribeTrainingJob",
                "sagemaker:ListTags",
                "sagemaker:StopTrainingJob",
            ],
            [jobs],
        ),
        # None of these knows resources (Service Authorization Reference).
        _allow(
            "Find",
            [
                "sagemaker:ListTrainingJobs",
                "pricing:GetProducts",
                "servicequotas:ListServiceQuotas",
                "cloudwatch:DescribeAlarms",
                "cloudwatch:GetMetricData",
            ],
            ["*"],
        ),
        _allow("CheckRole", ["iam:GetRole"], [role]),
        _allow("CheckImage", ["ecr:DescribeImages"], [_repository(places, image)]),
        _allow(
            "Logs",
            ["logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents"],
            [places.arn("logs", f"log-group:{_LOGS}:*")],
        ),
        _allow("GiveRole", ["iam:PassRole"], [role])
        | {"Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}},
    ]
    if index:
        statements.append(_allow("ReadIndex", ["s3:GetObject"], index))
    statements += _alarms(config, places)
    keys = _keys(config, places)
    if keys:
        statements.append(_allow("Keys", ["kms:CreateGrant", "kms:DescribeKey"], keys))
    if config.cluster.remote_debug:
        target = {"ssm:resourceTag/aws:ssmmessages:target-id": "sagemaker-training-job:*"}
        statements.append(
            _allow("Shell", ["ssm:StartSession"], ["*"]) | {"Condition": {"StringLike": target}}
        )
    return statements


def _alarms(config: RunConfig, places: _Places) -> list[dict[str, Any]]:
    """What `alarms` needs, and whoever starts a job of a run that has them."""
    named = [one for one in (config.alerts.sns_topic,) if one is not None]
    own = places.arn("sns", topic_name(config.name))
    return [
        _allow(
            "Alarms",
            ["cloudwatch:PutMetricAlarm", "cloudwatch:DeleteAlarms"],
            [places.arn("cloudwatch", f"alarm:{alarm_prefix(config.name)}*")],
        ),
        _allow(
            "AlarmRule",
            [
                "events:DescribeRule",
                "events:ListTagsForResource",
                "events:ListTargetsByRule",
                "events:PutRule",
                "events:TagResource",
                "events:PutTargets",
                "events:RemoveTargets",
                "events:DeleteRule",
            ],
            [places.arn("events", f"rule/{rule_name(config.name)}")],
        ),
        _allow("LookAtTopic", ["sns:GetTopicAttributes"], [own, *named]),
        _allow(
            "AlarmTopic",
            [
                "sns:CreateTopic",
                "sns:TagResource",
                "sns:ListTagsForResource",
                "sns:SetTopicAttributes",
                "sns:Subscribe",
                "sns:DeleteTopic",
            ],
            [own],
        ),
    ]


def _job(config: RunConfig, places: _Places, image: str) -> list[dict[str, Any]]:
    # A channel is every object whose name begins so.
    read = [
        places.s3(f"{path}*" if "/" in path else f"{path}/*") for path in map(_path, places.read)
    ]
    own = places.s3(f"{places.bucket}/{config.name}/*")
    statements = [
        _allow("List", ["s3:ListBucket"], places.buckets),
        _allow("Read", ["s3:GetObject"], sorted({*read, own})),
        # Deleting is for checkpoints that a job drops; whether SageMaker does it shows only there.
        _allow("Write", ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"], [own]),
        _allow(
            "Logs",
            [
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
            ],
            [places.arn("logs", f"log-group:{_LOGS}"), places.arn("logs", f"log-group:{_LOGS}:*")],
        ),
        _allow("Metrics", ["cloudwatch:PutMetricData"], ["*"])
        | {"Condition": {"StringEquals": {"cloudwatch:namespace": _LOGS}}},
        _allow("ImageToken", ["ecr:GetAuthorizationToken"], ["*"]),
        _allow(
            "Image",
            ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
            [_repository(places, image)],
        ),
    ]
    keys = _keys(config, places)
    if keys:
        statements.append(
            _allow("Keys", ["kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey"], keys)
        )
    statements += _alerts(config, places)
    if config.cluster.vpc:
        statements.append(_allow("Network", _NETWORK_ACTIONS, ["*"]))
    if config.cluster.remote_debug:
        statements.append(_allow("Shell", _SHELL_ACTIONS, ["*"]))
    return statements


def _alerts(config: RunConfig, places: _Places) -> list[dict[str, Any]]:
    """What the job's own alerts need: to read the addresses, and to publish."""
    alerts = config.alerts
    named = [one for one in (alerts.slack_secret, alerts.webhook_secret) if one is not None]
    parameters = [one for one in named if ":ssm:" in one or one.startswith("ssm:")]
    secrets = [one for one in named if one not in parameters]
    statements = []
    if secrets:
        # Behind a secret's name its ARN has a hyphen and six characters of Secrets Manager's.
        arns = [
            one if one.startswith("arn:") else places.arn("secretsmanager", f"secret:{one}-??????")
            for one in secrets
        ]
        statements.append(_allow("Secrets", ["secretsmanager:GetSecretValue"], arns))
    if parameters:
        arns = [
            one
            if one.startswith("arn:")
            else places.arn("ssm", f"parameter/{one.removeprefix('ssm:').lstrip('/')}")
            for one in parameters
        ]
        statements.append(_allow("Parameters", ["ssm:GetParameter"], arns))
    if alerts.sns_topic is not None:
        statements.append(_allow("Topic", ["sns:Publish"], [alerts.sns_topic]))
    return statements


_NETWORK_ACTIONS = [
    f"ec2:{action}"
    for action in (
        "CreateNetworkInterface",
        "CreateNetworkInterfacePermission",
        "DeleteNetworkInterface",
        "DeleteNetworkInterfacePermission",
        "DescribeDhcpOptions",
        "DescribeNetworkInterfaces",
        "DescribeSecurityGroups",
        "DescribeSubnets",
        "DescribeVpcs",
    )
]
"""For a job in a VPC; the same list in the guide."""

_SHELL_ACTIONS = [
    f"ssmmessages:{action}"
    for action in (
        "CreateControlChannel",
        "CreateDataChannel",
        "OpenControlChannel",
        "OpenDataChannel",
    )
]
"""For remote debugging ("Access a training container through AWS Systems Manager", same guide)."""


def _keys(config: RunConfig, places: _Places) -> list[str]:
    """ARNs of the run's KMS keys; an alias is none, and a policy names keys only."""
    named = (config.output_kms_key, config.cluster.volume_kms_key)
    arns = {
        key
        if key.startswith("arn:")
        else places.arn("kms", "key/*" if key.startswith("alias/") else f"key/{key}")
        for key in named
        if key is not None
    }
    return sorted(arns)


def _repository(places: _Places, image: str) -> str:
    """The repository of ``ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG``."""
    registry, _, name = image.partition("/")
    account, _, _, region, *_ = registry.split(".")
    name = name.split("@")[0].split(":")[0]
    return f"arn:{places.partition}:ecr:{region}:{account}:repository/{name}"


def _path(uri: str) -> str:
    return uri.removeprefix("s3://")


def _allow(name: str, actions: Iterable[str], resources: Iterable[str]) -> dict[str, Any]:
    return {
        "Sid": name,
        "Effect": "Allow",
        "Action": sorted(actions),
        "Resource": list(dict.fromkeys(resources)),
    }


def _policy(statements: list[dict[str, Any]]) -> Policy:
    return {"Version": _VERSION, "Statement": statements}
