"""Least-privilege IAM policies for a run: one for the user who submits it, one for the jobs' role.

A test records the AWS calls of the laptop and compares them with the first policy, both ways. What
SageMaker does with the role cannot be recorded: the second policy follows the list in "SageMaker AI
Roles: CreateTrainingJob API: Execution Role Permissions" (SageMaker developer guide, 2026-11).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NotRequired, TypedDict, cast

from sm_train.entrypoints.job_interface.index_location import indexed_by, removal_list, stream_uri
from sm_train.entrypoints.storage.bucket_settings import BUCKET_DEFAULT
from sm_train.estimators.config.naming import (
    ROLE_NOT_SET,
    canary_prefix,
    measuring_run,
    staging_bucket,
)
from sm_train.estimators.config.placement import placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.alarm_requests import alarm_prefix, rule_name, topic_name
from sm_train.estimators.request.images import image_uri, in_ecr

Condition = dict[str, dict[str, str] | dict[str, list[str]]]


class Permission(TypedDict):
    """A statement of an identity policy."""

    Sid: str
    Effect: str
    Action: list[str]
    Resource: list[str]
    Condition: NotRequired[Condition]


class TrustPermission(TypedDict):
    """A statement of a role's trust policy."""

    Effect: str
    Principal: dict[str, str]
    Action: str
    Condition: Condition


class PolicyDocument(TypedDict):
    """An IAM policy document."""

    Version: str
    Statement: list[Permission] | list[TrustPermission]


PARAMETER_PREFIX = "ssm:"
"""Begins the name of a secret that is a parameter of Systems Manager."""

_VERSION = "2012-10-17"
_WATCH_ACTIONS = frozenset(
    """
    sagemaker:ListTrainingJobs sagemaker:Search sagemaker:DescribeTrainingJob
    sagemaker:CreateTrainingJob sagemaker:StopTrainingJob sagemaker:UpdateTrainingJob
    sagemaker:ListTags sagemaker:AddTags
    iam:PassRole
    s3:ListBucket s3:GetBucketLocation s3:GetObject s3:PutObject s3:AbortMultipartUpload
    logs:DescribeLogStreams logs:FilterLogEvents logs:GetLogEvents
    cloudwatch:DescribeAlarms cloudwatch:PutMetricAlarm cloudwatch:DeleteAlarms
    events:DescribeRule events:ListTagsForResource events:ListTargetsByRule events:PutRule
    events:PutTargets events:TagResource
    kms:CreateGrant kms:Decrypt kms:DescribeKey kms:GenerateDataKey
    """.split()
)
"""What `watch` calls to follow a run, to restart its jobs and to update its alarms."""

_LOG_GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True)
class RunScope:
    """The account, region and S3 locations of a run.

    ``inputs`` are the S3 URIs that the jobs read and the run does not write.
    """

    run: str
    partition: str
    account: str
    region: str
    bucket: str
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, config: RunConfig, region: str) -> RunScope:
        """Return the scope of a run in ``region``."""
        _, partition, _, _, account, _ = (config.role or ROLE_NOT_SET).split(":", 5)
        optional = (config.index_uri, config.data.validation, config.model.components)
        inputs = [
            config.data.uri,
            *filter(None, optional),
            *(channel.uri for channel in config.channels.values() if channel.uri is not None),
            *config.source_indexes.values(),
        ]
        # A prefix of the index covers its list of removed samples.
        lists = config.removal_lists.values()
        inputs += [uri for uri in lists if indexed_by(uri) not in inputs]
        bucket = staging_bucket(config, region)
        return cls(config.name, partition, account, region, bucket, tuple(inputs))

    def arn(self, service: str, resource: str) -> str:
        """Return the ARN of a resource of the run's account and region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    @property
    def _runs(self) -> list[str]:
        """Patterns of the names of the run, and of those of its measurements and canaries."""
        return [self.run, measuring_run(self.run), f"{canary_prefix(self.run)}*"]

    @property
    def job_names(self) -> list[str]:
        """Patterns of the names of the jobs of the run, its measurements and its canaries.

        Names of runs contain no double hyphen, so the jobs of no other run match.
        """
        return [f"{run}--*" for run in self._runs]

    @property
    def log_streams(self) -> list[str]:
        """ARN patterns of the log streams of the jobs, which start with the job's name."""
        group = f"log-group:{_LOG_GROUP}:log-stream"
        return [self.arn("logs", f"{group}:{name}") for name in self.job_names]

    def s3_arn(self, path: str) -> str:
        """Return the ARN of a bucket, of an object, or of a pattern of objects."""
        return f"arn:{self.partition}:s3:::{path}"

    @property
    def run_prefixes(self) -> list[str]:
        """Patterns of the keys that the run, its measurements and its canaries write."""
        return [f"{run}/*" for run in self._runs]

    @property
    def run_objects(self) -> list[str]:
        """ARN patterns of the objects below :attr:`run_prefixes`."""
        return [self.s3_arn(f"{self.bucket}/{prefix}") for prefix in self.run_prefixes]

    def list_permissions(self, operator: str, *others: str) -> list[Permission]:
        """Return the statements that allow listing what the run reads and writes, and ``others``.

        ``operator`` is that of the condition. ``StringLike`` allows no request without a prefix.
        """
        prefixes: dict[str, list[str]] = {self.bucket: self.run_prefixes}
        for uri in (*self.inputs, *others):
            bucket, _, key = _bucket_and_key(uri).partition("/")
            prefixes.setdefault(bucket, []).append(f"{key}*")
        arns = [self.s3_arn(bucket) for bucket in sorted(prefixes)]
        listings = [
            allow(
                # A Sid has letters and digits only. Names of buckets have no capitals.
                f"List{bucket.replace('-', 'Dash').replace('.', 'Dot')}",
                ["s3:ListBucket"],
                [self.s3_arn(bucket)],
                {operator: {"s3:prefix": sorted(set(names))}},
            )
            for bucket, names in sorted(prefixes.items())
        ]
        return [allow("LocateBuckets", ["s3:GetBucketLocation"], arns), *listings]


def policies(config: RunConfig, region: str, image: str) -> dict[str, PolicyDocument]:
    """Return the policies of a run.

    ``laptop`` allows submitting and monitoring the run, ``job`` is the policy of its jobs' role,
    ``trust`` lets SageMaker assume that role, and ``watch`` is the policy of the scheduled function
    that watches the run. ``image`` is the image of the jobs.

    Raises:
        ValueError: AWS has no image for one of the run's fallbacks.
    """
    scope = RunScope.of(config, region)
    laptop, job = _laptop_permissions(config, scope, image), _job_permissions(config, scope, image)
    fallbacks = placements(config, region)[1:]
    for fallback in fallbacks:
        fallback_scope = RunScope.of(fallback.config, fallback.region)
        fallback_image = image_uri(fallback.config, fallback.region)
        laptop = _merge(
            laptop, _laptop_permissions(fallback.config, fallback_scope, fallback_image)
        )
        job = _merge(job, _job_permissions(fallback.config, fallback_scope, fallback_image))
    if fallbacks:
        # Relocating copies large checkpoints in parts, and aborts a copy that fails.
        [staging] = [statement for statement in laptop if statement["Sid"] == "ReadAndWriteRun"]
        laptop.append(allow("AbortCopies", ["s3:AbortMultipartUpload"], staging["Resource"]))
    trust: TrustPermission = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
        "Condition": {"StringEquals": {"aws:SourceAccount": scope.account}},
    }
    return {
        "laptop": {"Version": _VERSION, "Statement": laptop},
        "job": {"Version": _VERSION, "Statement": job},
        "trust": {"Version": _VERSION, "Statement": [trust]},
        "watch": {"Version": _VERSION, "Statement": list(_watch_permissions(laptop))},
    }


def _watch_permissions(laptop: Iterable[Permission]) -> Iterator[Permission]:
    """Yield the part of the submitter's permissions that watching needs."""
    for permission in laptop:
        actions = [name for name in permission["Action"] if name in _WATCH_ACTIONS]
        if actions:
            yield permission | {"Action": actions}


def merge_policies(documents: Iterable[PolicyDocument]) -> PolicyDocument:
    """Return one policy that allows what any of ``documents`` allows."""
    merged: list[Permission] = []
    for document in documents:
        merged = _merge(merged, cast("list[Permission]", document["Statement"]))
    return {"Version": _VERSION, "Statement": merged}


def policy_document(permissions: list[Permission]) -> PolicyDocument:
    """Return the document of statements; those with one Sid become one."""
    return {"Version": _VERSION, "Statement": _merge([], permissions)}


def _merge(permissions: list[Permission], others: list[Permission]) -> list[Permission]:
    """Merge the resources of statements with the same Sid, and the lists in their conditions."""
    merged = {permission["Sid"]: permission for permission in permissions}
    for other in others:
        existing = merged.get(other["Sid"], other)
        resources = dict.fromkeys([*existing["Resource"], *other["Resource"]])
        merged[other["Sid"]] = existing | {"Resource": list(resources)}
        for operator, values in other.get("Condition", {}).items():
            for key, names in values.items():
                if isinstance(names, list):
                    known = existing["Condition"][operator][key]
                    both = sorted({*known, *names})
                    merged[other["Sid"]]["Condition"] = {operator: {key: both}}
    return list(merged.values())


def _laptop_permissions(config: RunConfig, scope: RunScope, image: str) -> list[Permission]:
    """Return what `submit`, `check` and `cost` call, and the commands that manage jobs."""
    # SageMaker writes job names in lower case into ARNs.
    jobs = [scope.arn("sagemaker", f"training-job/{name.lower()}") for name in scope.job_names]
    role = config.role or ROLE_NOT_SET
    permissions = [
        *scope.list_permissions("StringLike", stream_uri(config.data.uri)),
        allow("ReadAndWriteRun", ["s3:GetObject", "s3:PutObject"], scope.run_objects),
        allow(
            "ManageJobs",
            [
                "sagemaker:CreateTrainingJob",
                "sagemaker:AddTags",
                "sagemaker:DescribeTrainingJob",
                "sagemaker:ListTags",
                "sagemaker:StopTrainingJob",
                "sagemaker:UpdateTrainingJob",
            ],
            jobs,
        ),
        # None of these supports resource-level permissions (Service Authorization Reference).
        allow(
            "ListAndQuery",
            [
                "sagemaker:ListTrainingJobs",
                "sagemaker:Search",
                "pricing:GetProducts",
                "servicequotas:ListServiceQuotas",
                "cloudwatch:DescribeAlarms",
                "cloudwatch:GetMetricData",
            ],
            ["*"],
        ),
        # `check` simulates the jobs' role, and the user or role that runs it, whose ARN a policy
        # cannot name. A session of a role does not contain the role's path, which GetRole returns.
        allow(
            "SimulatePermissions",
            ["iam:GetRole", "iam:SimulatePrincipalPolicy"],
            [f"arn:{scope.partition}:iam::{scope.account}:{kind}/*" for kind in ("role", "user")],
        ),
        *_secret_check_permissions(config, scope),
        *_image_permissions("CheckImage", ["ecr:DescribeImages"], scope, image),
        *_network_check_permissions(config, scope),
        *_training_plan_permissions(config),
        # The first two have no resource smaller than a log group (Service Authorization Reference).
        allow(
            "SearchLogs",
            ["logs:DescribeLogStreams", "logs:FilterLogEvents"],
            [scope.arn("logs", f"log-group:{_LOG_GROUP}:*")],
        ),
        allow("ReadLogs", ["logs:GetLogEvents"], scope.log_streams),
        allow(
            "PassRole",
            ["iam:PassRole"],
            [role],
            {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
        ),
    ]
    indexes = [*filter(None, [config.index_uri]), *config.source_indexes.values()]
    if indexes:
        lists = [removal_list(uri) for uri in indexes]
        arns = [scope.s3_arn(_bucket_and_key(uri)) for uri in (*indexes, *lists)]
        permissions.append(allow("ReadIndex", ["s3:GetObject"], arns))
    if config.bucket_keys:
        actions = ["s3:GetBucketPolicy", "s3:GetEncryptionConfiguration"]
        permissions.append(allow("CheckEncryption", actions, [scope.s3_arn(scope.bucket)]))
    permissions += _alarm_permissions(config, scope)
    actions = ["kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"]
    permissions += key_permissions(config, scope, actions)
    if config.cluster.remote_debug:
        targets = [f"sagemaker-training-job:{name}" for name in scope.job_names]
        target = {"ssm:resourceTag/aws:ssmmessages:target-id": targets}
        permissions.append(allow("OpenShell", ["ssm:StartSession"], ["*"], {"StringLike": target}))
    return permissions


def _network_check_permissions(config: RunConfig, scope: RunScope) -> list[Permission]:
    """Return what `check` needs to see the run's VPC and file systems.

    The actions of EC2 have no resources (Service Authorization Reference).
    """
    if config.cluster.vpc is None:
        return []
    names = ("Subnets", "RouteTables", "VpcEndpoints")
    return [
        allow("CheckNetwork", [f"ec2:Describe{name}" for name in names], ["*"]),
        *_file_system_permissions("CheckFileSystems", config, scope, _CHECK_ACTIONS),
    ]


def _training_plan_permissions(config: RunConfig) -> list[Permission]:
    """Return what describes the run's training plan, and searches plans that are for sale.

    The search has no resource (Service Authorization Reference).
    """
    plan = config.cluster.training_plan
    if plan is None:
        return []
    search = allow("SearchPlans", ["sagemaker:SearchTrainingPlanOfferings"], ["*"])
    return [allow("DescribePlan", ["sagemaker:DescribeTrainingPlan"], [plan]), search]


_MOUNT_ACTIONS = {
    "FSxLustre": ["fsx:DescribeFileSystems"],
    "EFS": ["elasticfilesystem:DescribeMountTargets"],
}
"""The actions of a job that mounts a file system, by its type: what the managed policy
AmazonSageMakerFullAccess has for them; the guide lists none."""

_CHECK_ACTIONS = {
    "FSxLustre": ["fsx:DescribeFileSystems"],
    "EFS": ["elasticfilesystem:DescribeFileSystems", "elasticfilesystem:DescribeMountTargets"],
}


def _file_system_permissions(
    sid: str, config: RunConfig, scope: RunScope, actions: dict[str, list[str]]
) -> Iterator[Permission]:
    """Yield statements that allow ``actions``, by the type of a file system, on the run's."""
    for kind, service in (("FSxLustre", "fsx"), ("EFS", "elasticfilesystem")):
        ids = {section.id for section in config.file_systems.values() if section.type == kind}
        if ids:
            arns = [scope.arn(service, f"file-system/{name}") for name in sorted(ids)]
            yield allow(f"{sid}{kind}", actions[kind], arns)


def _package_permissions(config: RunConfig) -> list[Permission]:
    """Return what a job needs to install packages from a CodeArtifact repository.

    The actions are those of its user guide's policies ("Create a VPC endpoint policy for
    CodeArtifact", read 2026-11).
    """
    index = config.cluster.package_index or ""
    if not index.startswith("arn:"):
        return []
    prefix, _, path = index.partition(":repository/")
    domain = f"{prefix}:domain/{path.partition('/')[0]}"
    return [
        allow("LogInToPackageIndex", ["codeartifact:GetAuthorizationToken"], [domain]),
        allow(
            "ReadPackages",
            ["codeartifact:GetRepositoryEndpoint", "codeartifact:ReadFromRepository"],
            [index],
        ),
        allow(
            "GetBearerToken",
            ["sts:GetServiceBearerToken"],
            ["*"],
            {"StringEquals": {"sts:AWSServiceName": "codeartifact.amazonaws.com"}},
        ),
    ]


def _alarm_permissions(config: RunConfig, scope: RunScope) -> list[Permission]:
    """Return what `alarms` needs, and every command that starts a job of a run with alarms."""
    run_topic = scope.arn("sns", topic_name(config.name))
    topics = [run_topic]
    if config.alerts.sns_topic is not None:
        topics.append(config.alerts.sns_topic)
    return [
        allow(
            "ManageAlarms",
            ["cloudwatch:PutMetricAlarm", "cloudwatch:DeleteAlarms"],
            [scope.arn("cloudwatch", f"alarm:{alarm_prefix(config.name)}*")],
        ),
        allow(
            "ManageAlarmRule",
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
            [scope.arn("events", f"rule/{rule_name(config.name)}")],
        ),
        allow("ReadTopic", ["sns:GetTopicAttributes"], topics),
        allow(
            "ManageTopic",
            [
                "sns:CreateTopic",
                "sns:TagResource",
                "sns:ListTagsForResource",
                "sns:SetTopicAttributes",
                "sns:Subscribe",
                "sns:DeleteTopic",
            ],
            [run_topic],
        ),
    ]


def _job_permissions(config: RunConfig, scope: RunScope, image: str) -> list[Permission]:
    # A channel contains every object whose key starts with its prefix.
    inputs = [
        scope.s3_arn(f"{path}*" if "/" in path else f"{path}/*")
        for path in map(_bucket_and_key, scope.inputs)
    ]
    permissions = [
        # SageMaker calls S3 with this role. Whether each of its calls names a prefix is not
        # documented, so those without one are allowed.
        *scope.list_permissions("StringLikeIfExists"),
        allow("Read", ["s3:GetObject"], sorted({*inputs, *scope.run_objects})),
        # Deleting is for checkpoints that a job prunes; whether SageMaker then deletes them in S3
        # is only visible there.
        allow(
            "Write",
            ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            scope.run_objects,
        ),
        *container_permissions(config, scope, image, _LOG_GROUP, scope.job_names),
        *_file_system_permissions("MountFileSystems", config, scope, _MOUNT_ACTIONS),
    ]
    if config.cluster.image_credentials is not None:
        function = [config.cluster.image_credentials]
        permissions.append(allow("LogInToRegistry", ["lambda:InvokeFunction"], function))
    actions = ["kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey"]
    permissions += key_permissions(config, scope, actions)
    permissions += _secret_permissions(config, scope)
    if config.alerts.sns_topic is not None:
        permissions.append(allow("PublishAlerts", ["sns:Publish"], [config.alerts.sns_topic]))
    if config.trackers.mlflow is not None and (uri := config.trackers.mlflow.uri) is not None:
        permissions += _mlflow_permissions(uri)
    if config.cluster.remote_debug:
        permissions.append(allow("OfferShell", _SHELL_ACTIONS, ["*"]))
    return permissions


def container_permissions(
    config: RunConfig, scope: RunScope, image: str, log_group: str, job_names: Iterable[str]
) -> list[Permission]:
    """Return what any job of SageMaker needs to start: its image, its log, its packages, its VPC.

    ``job_names`` are patterns; the log streams of a job start with its name.
    """
    group = f"log-group:{log_group}"
    groups = [scope.arn("logs", group), scope.arn("logs", f"{group}:*")]
    streams = [scope.arn("logs", f"{group}:log-stream:{name}") for name in job_names]
    pull = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    namespace: Condition = {"StringEquals": {"cloudwatch:namespace": log_group}}
    creating = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams"]
    permissions = [
        allow("CreateLogs", creating, groups),
        allow("WriteLogs", ["logs:PutLogEvents"], streams),
        allow("PutMetrics", ["cloudwatch:PutMetricData"], ["*"], namespace),
        allow("GetImageToken", ["ecr:GetAuthorizationToken"], ["*"]),
        *_image_permissions("PullImage", pull, scope, image),
        *_package_permissions(config),
    ]
    if config.cluster.vpc:
        permissions.append(allow("JoinNetwork", _NETWORK_ACTIONS, ["*"]))
    return permissions


def _mlflow_permissions(uri: str) -> list[Permission]:
    """Return what the job needs to log to an MLflow server of SageMaker; others take a key.

    The actions are those that MLflow's client calls ("Actions, resources, and condition keys for
    Amazon SageMaker with MLflow", service authorization reference, read 2026-11).
    """
    return [allow("LogToMlflow", _MLFLOW_ACTIONS, [uri])] if uri.startswith("arn:") else []


def _secret_arns(config: RunConfig, scope: RunScope) -> tuple[list[str], list[str]]:
    """Return the ARNs of the job's secrets and of its parameters, with wildcards."""
    names = list(config.secret_names.values())
    parameters = [name for name in names if ":ssm:" in name or name.startswith(PARAMETER_PREFIX)]
    # Secrets Manager appends a hyphen and six characters to the name in a secret's ARN.
    return (
        [
            name
            if name.startswith("arn:")
            else scope.arn("secretsmanager", f"secret:{name}-??????")
            for name in names
            if name not in parameters
        ],
        [
            name
            if name.startswith("arn:")
            else scope.arn("ssm", f"parameter/{name.removeprefix(PARAMETER_PREFIX).lstrip('/')}")
            for name in parameters
        ],
    )


def _secret_permissions(config: RunConfig, scope: RunScope) -> list[Permission]:
    """Return what the job needs to read the secrets of alerts and trackers."""
    secrets, parameters = _secret_arns(config, scope)
    permissions = []
    if secrets:
        permissions.append(allow("ReadSecrets", ["secretsmanager:GetSecretValue"], secrets))
    if parameters:
        permissions.append(allow("ReadParameters", ["ssm:GetParameter"], parameters))
    return permissions


def _secret_check_permissions(config: RunConfig, scope: RunScope) -> list[Permission]:
    """Return what `check` needs to see that the job can read its secrets; it reads none."""
    secrets, parameters = _secret_arns(config, scope)
    permissions = []
    if secrets:
        permissions.append(allow("CheckSecrets", ["secretsmanager:DescribeSecret"], secrets))
    if parameters:
        permissions.append(allow("CheckParameters", ["ssm:DescribeParameters"], ["*"]))
    return permissions


_MLFLOW_ACTIONS = [
    f"sagemaker-mlflow:{action}"
    for action in (
        "CreateExperiment",
        "CreateRun",
        "GetExperiment",
        "GetExperimentByName",
        "GetMetricHistory",
        "GetRun",
        "ListArtifacts",
        "LogBatch",
        "LogMetric",
        "LogParam",
        "SearchRuns",
        "SetTag",
        "UpdateRun",
    )
]

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
"""The actions of a job in a VPC, from the same guide."""

_SHELL_ACTIONS = [
    f"ssmmessages:{action}"
    for action in (
        "CreateControlChannel",
        "CreateDataChannel",
        "OpenControlChannel",
        "OpenDataChannel",
    )
]
"""The actions of remote debugging ("Access a training container through AWS Systems Manager")."""


def key_permissions(config: RunConfig, scope: RunScope, actions: list[str]) -> list[Permission]:
    """Return what allows ``actions`` with the run's KMS keys.

    A policy cannot name an alias as its resource, so a condition limits it to keys with the alias
    ("Use aliases to control access to KMS keys", KMS developer guide, read 2026-11).
    """
    named = (config.output_kms_key, config.cluster.volume_kms_key)
    keys = {key for key in (*named, *config.bucket_kms_keys.values()) if key} - {BUCKET_DEFAULT}
    aliases = {key.rpartition(":")[2] for key in keys if ":alias/" in f":{key}"}
    arns = sorted(
        key if key.startswith("arn:") else scope.arn("kms", f"key/{key}")
        for key in keys
        if ":alias/" not in f":{key}"
    )
    permissions = [allow("UseKeys", actions, arns)] if arns else []
    if aliases:
        condition: Condition = {
            "ForAnyValue:StringEquals": {"kms:ResourceAliases": sorted(aliases)}
        }
        permissions.append(
            allow("UseKeysWithAlias", actions, [scope.arn("kms", "key/*")], condition)
        )
    return permissions


def _image_permissions(
    sid: str, actions: list[str], scope: RunScope, image: str
) -> list[Permission]:
    """Return a statement about the image's repository; none for a registry other than ECR."""
    return [allow(sid, actions, [_repository_arn(scope, image)])] if in_ecr(image) else []


def _repository_arn(scope: RunScope, image: str) -> str:
    """Return the ARN of the repository of ``ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG``."""
    registry, _, name = image.partition("/")
    account, _, _, region, *_ = registry.split(".")
    name = name.split("@")[0].split(":")[0]
    return f"arn:{scope.partition}:ecr:{region}:{account}:repository/{name}"


def _bucket_and_key(uri: str) -> str:
    return uri.removeprefix("s3://")


def allow(
    sid: str,
    actions: Iterable[str],
    resources: Iterable[str],
    condition: Condition | None = None,
) -> Permission:
    """Return the statement that allows ``actions`` on ``resources``, in the order of names."""
    permission: Permission = {
        "Sid": sid,
        "Effect": "Allow",
        "Action": sorted(actions),
        "Resource": list(dict.fromkeys(resources)),
    }
    if condition is not None:
        permission["Condition"] = condition
    return permission
