"""The SNS topic that a run's alarms tell: whether it would hear them, and one made for the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sm_train.estimators.request.alarms import PUBLISHERS, topic_name, topic_policy
from sm_train.estimators.request.training import RUN_TAG
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.aws.session import account_of
from sm_train.toolkit.errors import ExitCode, UserError


def require_region(topic: str, region: str) -> None:
    """Refuse a topic that an alarm cannot reach.

    Raises:
        UserError: it is in another region than the run.
    """
    actual = topic.split(":")[3]
    if actual != region:
        raise UserError(
            f"topic {topic}: is in {actual} and the run in {region}; alarms reach topics of their "
            f"own region only: name one in {region}",
            ExitCode.PREFLIGHT,
        )


def make_topic(session: Any, run: str, region: str, email: str) -> str:
    """The run's own topic, which tells ``email``.

    Raises:
        UserError: AWS refuses, or there is a topic of that name which is not ours.
    """
    arn = own_topic(session, run, region)
    sns = session.client("sns")
    if _attributes(session, arn) is not None and not _is_ours(sns, arn, run):
        raise UserError(
            f"topic {arn}: is there and was not made by `sm-train alarms`; give it with --topic",
            ExitCode.PREFLIGHT,
        )
    with translate_aws_errors(f"topic {arn}"):
        sns.create_topic(Name=topic_name(run), Tags=[{"Key": RUN_TAG, "Value": run}])
        sns.set_topic_attributes(
            TopicArn=arn, AttributeName="Policy", AttributeValue=json.dumps(topic_policy(arn))
        )
        sns.subscribe(TopicArn=arn, Protocol="email", Endpoint=email)
    return arn


def doubts(session: Any, topic: str) -> list[str]:
    """Why what is told to ``topic`` may reach nobody, with the mend.

    Raises:
        UserError: there is no such topic.
    """
    try:
        attributes = _attributes(session, topic)
    except UserError as error:
        return [f"whether alarms may publish to the topic is not known: {error}"]
    if attributes is None:
        raise UserError(f"topic {topic}: does not exist; make it, or give --email ADDRESS")
    return [*_locked_out(topic, attributes), *_unheard(attributes)]


def _locked_out(topic: str, attributes: dict[str, str]) -> Iterator[str]:
    policy = json.loads(attributes.get("Policy", "{}"))
    lacking = [
        statement
        for service, statement in zip(PUBLISHERS, topic_policy(topic)["Statement"], strict=True)
        if not _may_publish(policy, service)
    ]
    if lacking:
        yield (
            "the topic's policy lets these not publish, so their messages are lost; add to its "
            f"Statement: {json.dumps(lacking)}"
        )
    key = attributes.get("KmsMasterKeyId")
    if key:
        # AWS re:Post, "Why didn't I receive an SNS notification for my CloudWatch alarm trigger?"
        mend = (
            "no policy lets alarms use that key: take one of your own"
            if key.endswith("alias/aws/sns")
            else f"its policy must allow kms:Decrypt and kms:GenerateDataKey* to "
            f"{' and '.join(PUBLISHERS)}"
        )
        yield f"the topic is encrypted with {key}; {mend}"


def _unheard(attributes: dict[str, str]) -> Iterator[str]:
    if attributes.get("SubscriptionsConfirmed") == "0":
        yield "nobody has confirmed a subscription to the topic: its messages reach nobody"


def _may_publish(policy: dict[str, Any], service: str) -> bool:
    """Conditions are taken to hold. An alarm publishes as its account does, which the policy that a
    topic is made with allows; EventBridge needs to be named.
    """
    for statement in policy.get("Statement", []):
        actions = statement.get("Action", [])
        actions = [actions] if isinstance(actions, str) else actions
        publishes = any(one.lower() in ("sns:publish", "sns:*", "*") for one in actions)
        if statement.get("Effect") != "Allow" or not publishes:
            continue
        principal = statement.get("Principal", {})
        if principal == "*":
            principal = {"AWS": "*", "Service": "*"}
        services = principal.get("Service", [])
        anybody = principal.get("AWS") in ("*", ["*"])
        open_to_all = anybody and not statement.get("Condition")
        account = anybody and service == "cloudwatch.amazonaws.com"
        if service in services or services == "*" or open_to_all or account:
            return True
    return False


def _attributes(session: Any, topic: str) -> dict[str, str] | None:
    from botocore.exceptions import ClientError

    with translate_aws_errors(f"topic {topic}"):
        try:
            answer = session.client("sns").get_topic_attributes(TopicArn=topic)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("NotFound", "NotFoundException"):
                raise
            return None
    attributes: dict[str, str] = answer["Attributes"]
    return attributes


def own_topic(session: Any, run: str, region: str) -> str:
    """The ARN of the topic that is or would be made for the run."""
    partition = session.get_partition_for_region(region)
    return f"arn:{partition}:sns:{region}:{account_of(session)}:{topic_name(run)}"


def _is_ours(sns: Any, topic: str, run: str) -> bool:
    with translate_aws_errors(f"topic {topic}"):
        tags = sns.list_tags_for_resource(ResourceArn=topic)["Tags"]
    return {"Key": RUN_TAG, "Value": run} in tags


def remove_topic(session: Any, run: str, region: str) -> str | None:
    """Remove the topic that was made for the run; its ARN, or None where there is none."""
    sns, topic = session.client("sns"), own_topic(session, run, region)
    if _attributes(session, topic) is None or not _is_ours(sns, topic, run):
        return None
    with translate_aws_errors(f"topic {topic}"):
        sns.delete_topic(TopicArn=topic)
    return topic
