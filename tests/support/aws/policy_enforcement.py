"""IAM's decision on a request: the permissions that it needs, and whether a policy has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import parse_qs

ACCOUNT = "345678901234"
"""moto's account, which owns every bucket unless a test names another owner.

moto's default is an account of documentation, which sm-train refuses."""


class Permission(NamedTuple):
    """What IAM checks for a call; ``prefix`` is that of a request that lists a bucket."""

    action: str
    resource: str
    prefix: str | None = None


def allowed(policy: Any, action: str, resource: str, prefix: str | None = None) -> str | None:
    """Return the Sid of the statement that allows ``action`` on ``resource``.

    ``prefix`` is that of a request that lists a bucket.
    """
    for statement in policy["Statement"]:
        if action not in statement["Action"]:
            continue
        conditions = statement.get("Condition", {})
        prefixes = conditions.get("StringLike", {}).get("s3:prefix")
        if prefix is not None or prefixes is None:
            prefixes = conditions.get("StringLikeIfExists", {}).get("s3:prefix", prefixes)
        listable = prefixes is None or any(
            fnmatchcase(prefix or "", pattern) for pattern in prefixes
        )
        if listable and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"]):
            sid: str = statement["Sid"]
            return sid
    return None


def needed_for_json(operation: str, body: Mapping[str, Any]) -> Iterator[Permission]:
    """Yield what IAM checks for a call of a service that speaks JSON."""
    region = body.get("_region", "us-east-1")

    def arn(service: str, resource: str) -> str:
        return f"arn:aws:{service}:{region}:{ACCOUNT}:{resource}"

    job = str(body.get("TrainingJobName", "")).lower()
    if operation in _WITHOUT_RESOURCE:
        yield Permission(f"{_WITHOUT_RESOURCE[operation]}:{operation}", "*")
    elif operation in ("DescribeLogStreams", "FilterLogEvents"):
        yield Permission(f"logs:{operation}", arn("logs", f"log-group:{body['logGroupName']}:*"))
    elif operation == "GetLogEvents":
        stream = f"log-group:{body['logGroupName']}:log-stream:{body['logStreamName']}"
        yield Permission("logs:GetLogEvents", arn("logs", stream))
    elif operation in _RULES:
        name = body.get("Rule") or body.get("Name") or body["ResourceARN"].rpartition("/")[2]
        yield Permission(f"events:{operation}", arn("events", f"rule/{name}"))
        if "Tags" in body:
            yield Permission("events:TagResource", arn("events", f"rule/{name}"))
    elif operation in ("PutMetricAlarm", "DeleteAlarms"):
        for alarm in body.get("AlarmNames") or [body["AlarmName"]]:
            yield Permission(f"cloudwatch:{operation}", arn("cloudwatch", f"alarm:{alarm}"))
    elif operation == "GetSecretValue":
        secret = body["SecretId"]
        found = (
            secret
            if secret.startswith("arn:")
            else arn("secretsmanager", f"secret:{secret}-1a2B3c")
        )
        yield Permission("secretsmanager:GetSecretValue", found)
    elif operation == "GetParameter":
        yield Permission("ssm:GetParameter", arn("ssm", f"parameter/{body['Name'].lstrip('/')}"))
    elif operation in _QUEUES:
        queue = (body.get("QueueUrl") or body["SourceArn"].replace(":", "/")).rpartition("/")[2]
        yield Permission(f"sqs:{_QUEUES[operation]}", arn("sqs", queue))
    elif operation in ("CreateProcessingJob", "DescribeProcessingJob"):
        name = arn("sagemaker", f"processing-job/{body['ProcessingJobName'].lower()}")
        yield Permission(f"sagemaker:{operation}", name)
        if operation == "CreateProcessingJob":
            yield Permission("sagemaker:AddTags", name)
            yield Permission("iam:PassRole", body["RoleArn"])
    elif operation in ("ListTags", "AddTags"):
        job = body["ResourceArn"].rpartition("/")[2].lower()
        yield Permission(f"sagemaker:{operation}", arn("sagemaker", f"training-job/{job}"))
    else:
        resource = arn("sagemaker", f"training-job/{job}") if job else "*"
        yield Permission(f"sagemaker:{operation}", resource)
    if operation == "CreateTrainingJob":
        yield Permission("sagemaker:AddTags", arn("sagemaker", f"training-job/{job}"))
        yield Permission("iam:PassRole", body["RoleArn"])


_WITHOUT_RESOURCE = {
    "ListServiceQuotas": "servicequotas",
    "GetMetricData": "cloudwatch",
    "DescribeAlarms": "cloudwatch",
    "ListTrainingJobs": "sagemaker",
    "Search": "sagemaker",
}
_QUEUES = {
    "GetQueueAttributes": "GetQueueAttributes",
    "SendMessageBatch": "SendMessage",
    "ReceiveMessage": "ReceiveMessage",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
    "StartMessageMoveTask": "StartMessageMoveTask",
}
"""Operations of SQS, which have the permissions of one message."""

_RULES = frozenset(
    "DescribeRule ListTagsForResource ListTargetsByRule PutRule PutTargets RemoveTargets "
    "DeleteRule".split()
)


def needed_in_s3(
    method: str, path: str, query: str, copy_source: str | None = None
) -> Iterator[Permission]:
    """Yield what IAM checks for a request to S3, addressed by path."""
    bucket, _, key = path.strip("/").partition("/")
    fields = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
    if not bucket:
        yield Permission("s3:ListAllMyBuckets", "*")
        return
    if copy_source is not None:
        yield Permission("s3:GetObject", f"arn:aws:s3:::{copy_source.strip('/').split('?')[0]}")
    if key:
        action = _object_action(method, fields)
        yield Permission(f"s3:{action}", f"arn:aws:s3:::{bucket}/{key}")
        return
    [action] = [found for name, found in _BUCKET_ACTIONS.items() if name in fields] or [
        {"PUT": "CreateBucket", "POST": "DeleteObject"}.get(method, "ListBucket")
    ]
    prefix = fields.get("prefix") if action.startswith("List") else None
    resource = f"arn:aws:s3:::{bucket}/*" if action == "DeleteObject" else f"arn:aws:s3:::{bucket}"
    yield Permission(f"s3:{action}", resource, prefix)


_BUCKET_ACTIONS = {
    "location": "GetBucketLocation",
    "policy": "GetBucketPolicy",
    "encryption": "GetEncryptionConfiguration",
    "versioning": "GetBucketVersioning",
    "versions": "ListBucketVersions",
    "uploads": "ListBucketMultipartUploads",
}


def _object_action(method: str, fields: Mapping[str, str]) -> str:
    version = "Version" if "versionId" in fields else ""
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in fields else f"DeleteObject{version}"
    if method in ("GET", "HEAD"):
        if "uploadId" in fields:
            return "ListMultipartUploadParts"
        return f"GetObject{version}{'Tagging' if 'tagging' in fields else ''}"
    return "PutObject"


def needed_for_query(service: str, content: bytes) -> Iterator[Permission]:
    """Yield what IAM checks for a call of IAM, STS, SNS or CloudFormation."""
    fields = {name: values[0] for name, values in parse_qs(content.decode()).items()}
    action = fields.get("Action", "")
    if service == "sts":  # GetCallerIdentity needs no permission
        return
    if service == "cloudformation":
        stack = f"arn:aws:cloudformation:us-east-1:{ACCOUNT}:stack/{fields['StackName']}/*"
        yield Permission(f"cloudformation:{action}", stack)
        return
    if service == "iam":
        name = fields.get("RoleName") or fields.get("PolicySourceArn", "/").rpartition("/")[2]
        kind = "user" if ":user/" in fields.get("PolicySourceArn", "") else "role"
        yield Permission(f"iam:{action}", f"arn:aws:iam::{ACCOUNT}:{kind}/{name}")
    else:
        new = f"arn:aws:{service}:us-east-1:{ACCOUNT}:{fields.get('Name')}"
        topic = fields.get("TopicArn") or fields.get("ResourceArn") or new
        yield Permission(f"{service}:{action}", topic)
        if action == "CreateTopic" and "Tags.member.1.Key" in fields:
            yield Permission("sns:TagResource", topic)


def denial(permission: Permission) -> str:
    """Return IAM's message for a request without a permission."""
    user = f"arn:aws:iam::{ACCOUNT}:user/researcher"
    return (
        f"User: {user} is not authorized to perform: {permission.action} on resource: "
        f"{permission.resource} because no identity-based policy allows the {permission.action} "
        "action"
    )


def json_denial(permission: Permission) -> tuple[int, dict[str, Any]]:
    """Return status and body of the response to a call of a service that speaks JSON."""
    return 400, {"__type": "AccessDeniedException", "message": denial(permission)}


def query_denial(permission: Permission) -> bytes:
    """Return the body of the response of IAM and SNS."""
    error = f"<Error><Code>AccessDenied</Code><Message>{denial(permission)}</Message></Error>"
    return f"<ErrorResponse>{error}</ErrorResponse>".encode()
