"""Check the SNS topic that a run's alarms notify, or create one for the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sm_train.estimators.request.alarm_requests import PUBLISHERS, topic_name, topic_policy
from sm_train.estimators.request.training_request import RUN_TAG
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.session import account_of
from sm_train.toolkit.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    import boto3


def require_topic_region(topic: str, region: str) -> None:
    """Refuse a topic that alarms cannot notify.

    Raises:
        UserError: the topic is in another region than the run.
    """
    topic_region = topic.split(":")[3]
    if topic_region != region:
        raise UserError(
            f"topic {topic}: is in {topic_region} and the run in {region}; alarms notify only "
            f"topics of their own region: name one in {region}",
            ExitCode.PREFLIGHT,
        )


def create_topic(
    session: boto3.Session, run: str, region: str, email: str, kms_key: str | None
) -> str:
    """Create the run's own topic and subscribe ``email`` to it; return its ARN.

    ``kms_key`` encrypts its messages while SNS stores them.

    Raises:
        UserError: AWS refuses, or somebody else created a topic of that name.
    """
    arn = run_topic_arn(session, run, region)
    sns = session.client("sns")
    if _attributes(session, arn) is not None and not _is_managed(session, arn, run):
        raise UserError(
            f"topic {arn}: already exists and was not created by `sm-train alarms`; pass it with "
            "--topic",
            ExitCode.PREFLIGHT,
        )
    with translate_aws_errors(f"topic {arn}"):
        sns.create_topic(Name=topic_name(run), Tags=[{"Key": RUN_TAG, "Value": run}])
        sns.set_topic_attributes(
            TopicArn=arn, AttributeName="Policy", AttributeValue=json.dumps(topic_policy(arn))
        )
        sns.set_topic_attributes(
            TopicArn=arn, AttributeName="KmsMasterKeyId", AttributeValue=kms_key or ""
        )
        sns.subscribe(TopicArn=arn, Protocol="email", Endpoint=email)
    return arn


def require_usable_key(kms_key: str | None) -> None:
    """Check that a new topic is encrypted, with a key that alarms can use.

    Raises:
        UserError: there is no key, or it is AWS's own.
    """
    if kms_key is None:
        raise UserError(
            "--email: name the customer-managed KMS key that encrypts the new topic: set "
            "output_kms_key in the run file, or pass --kms-key; --unencrypted creates the topic "
            "without one"
        )
    if _is_aws_key(kms_key):
        raise UserError(
            f"--kms-key: {kms_key} is AWS's own key, which alarms cannot use: their messages would "
            "be lost; pass a customer-managed key"
        )


def new_topic_warnings(kms_key: str | None) -> list[str]:
    """Return what to know about the encryption of a new topic, with the fix."""
    return ["the topic is not encrypted"] if kms_key is None else [_key_warning(kms_key)]


def topic_warnings(session: boto3.Session, topic: str) -> list[str]:
    """Return why messages to ``topic`` may reach nobody, each with the fix.

    Raises:
        UserError: the topic does not exist.
    """
    try:
        attributes = _attributes(session, topic)
    except UserError as error:
        return [f"cannot check whether alarms may publish to the topic: {error}"]
    if attributes is None:
        raise UserError(f"topic {topic}: does not exist; create it, or pass --email ADDRESS")
    return [*_permission_warnings(topic, attributes), *_subscription_warnings(attributes)]


def _permission_warnings(topic: str, attributes: Mapping[str, str]) -> Iterator[str]:
    policy = json.loads(attributes.get("Policy", "{}"))
    missing = [
        statement
        for service, statement in zip(PUBLISHERS, topic_policy(topic)["Statement"], strict=True)
        if not _may_publish(policy, service)
    ]
    if missing:
        yield (
            "the topic's policy does not allow alarms to publish, so their messages are lost; add "
            f"to its Statement: {json.dumps(missing)}"
        )
    if key := attributes.get("KmsMasterKeyId"):
        yield _key_warning(key)


def _key_warning(key: str) -> str:
    """Return what the key of a topic needs.

    Source: AWS re:Post, "How do I configure a CloudWatch alarm to use an encrypted SNS topic?"
    (read 2026-11); EventBridge's requests to KMS carry no aws:SourceAccount or aws:SourceArn to
    limit them to (SNS developer guide, "Key management").
    """
    if _is_aws_key(key):
        fix = "alarms cannot use that key: choose a customer-managed key"
    else:
        statement = {
            "Effect": "Allow",
            "Principal": {"Service": list(PUBLISHERS)},
            "Action": ["kms:Decrypt", "kms:GenerateDataKey*"],
            "Resource": "*",
        }
        fix = f"the Statement of the key's policy must contain: {json.dumps(statement)}"
    return f"the topic is encrypted with {key}; {fix}"


def _is_aws_key(key: str) -> bool:
    return key.endswith("alias/aws/sns")


def _subscription_warnings(attributes: Mapping[str, str]) -> Iterator[str]:
    if attributes.get("SubscriptionsConfirmed") == "0":
        yield "the topic has no confirmed subscription: its messages reach nobody"


def _may_publish(policy: dict[str, Any], service: str) -> bool:
    """Return whether ``policy`` allows ``service`` to publish, assuming its conditions hold.

    An alarm publishes as its account, which the default policy of a new topic allows; EventBridge
    must be named.
    """
    for statement in policy.get("Statement", []):
        actions = statement.get("Action", [])
        actions = [actions] if isinstance(actions, str) else actions
        publishes = any(action.lower() in ("sns:publish", "sns:*", "*") for action in actions)
        if statement.get("Effect") != "Allow" or not publishes:
            continue
        principal = statement.get("Principal", {})
        if principal == "*":
            principal = {"AWS": "*", "Service": "*"}
        services = principal.get("Service", [])
        any_account = principal.get("AWS") in ("*", ["*"])
        unconditional = any_account and not statement.get("Condition")
        as_account = any_account and service == "cloudwatch.amazonaws.com"
        if service in services or services == "*" or unconditional or as_account:
            return True
    return False


def _attributes(session: boto3.Session, topic: str) -> dict[str, str] | None:
    """Return the topic's attributes; None if it does not exist."""
    from botocore.exceptions import ClientError

    with translate_aws_errors(f"topic {topic}"):
        try:
            response = session.client("sns").get_topic_attributes(TopicArn=topic)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("NotFound", "NotFoundException"):
                raise
            return None
    return response["Attributes"]


def run_topic_arn(session: boto3.Session, run: str, region: str) -> str:
    """Return the ARN that the run's own topic has or would have."""
    partition = session.get_partition_for_region(region)
    return f"arn:{partition}:sns:{region}:{account_of(session)}:{topic_name(run)}"


def _is_managed(session: boto3.Session, topic: str, run: str) -> bool:
    with translate_aws_errors(f"topic {topic}"):
        tags = session.client("sns").list_tags_for_resource(ResourceArn=topic)["Tags"]
    return {"Key": RUN_TAG, "Value": run} in tags


def delete_topic(session: boto3.Session, run: str, region: str) -> str | None:
    """Delete the run's own topic; return its ARN, or None if there is none."""
    topic = run_topic_arn(session, run, region)
    if _attributes(session, topic) is None or not _is_managed(session, topic, run):
        return None
    with translate_aws_errors(f"topic {topic}"):
        session.client("sns").delete_topic(TopicArn=topic)
    return topic
