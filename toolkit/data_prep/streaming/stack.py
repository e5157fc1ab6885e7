"""The CloudFormation stack of `sm-train template pack-lambda`, and requests to its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.data_prep.streaming.companions import DeclaredColumns
from sm_train.entrypoints.data_prep.work.work_stages import in_groups
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    import boto3

_PARAMETERS = ("RawBucket", "ShardBytes", "Columns", "ColumnsFrom")
_OUTPUTS = ("QueueUrl", "Rejected", "RejectedArn", "SealerName", "Destination")

_PEEK_SECONDS = 600
"""Time for which dead letters that are read are hidden, if this program is killed."""

INVOCATION_SECONDS = 900
"""Longest time of a Lambda function."""


@dataclass(frozen=True)
class StreamStack:
    """The parts of a stack: queues, by their addresses, and the function that seals shards.

    ``raw_bucket`` is where images arrive, ``destination`` the prefix of the pack, and ``columns``
    what each image must have.
    """

    name: str
    session: boto3.Session
    raw_bucket: str
    destination: str
    shard_bytes: int
    queue: str
    dead_letters: str
    dead_letters_arn: str
    sealer: str
    columns: DeclaredColumns = field(default_factory=DeclaredColumns)

    def messages(self) -> tuple[int, int, int]:
        """Return how many messages wait, are in flight and are dead letters, as SQS estimates.

        Raises:
            UserError: access is denied.
        """
        waiting, in_flight = self._attributes(
            self.queue,
            "ApproximateNumberOfMessages",
            "ApproximateNumberOfMessagesNotVisible",
        )
        (dead,) = self._attributes(self.dead_letters, "ApproximateNumberOfMessages")
        return waiting, in_flight, dead

    def _attributes(self, queue: str, *names: Any) -> list[int]:
        with translate_aws_errors(queue):
            sqs: Any = self.session.client("sqs")
            found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=[*names])["Attributes"]
        return [int(found[name]) for name in names]

    def peek_dead_letters(self) -> Iterator[tuple[str, str]]:
        """Yield the ids and the bodies of all dead letters, which stay in their queue.

        They are hidden from other readers until all have been read.

        Raises:
            UserError: access is denied.
        """
        seen: dict[str, str] = {}
        with translate_aws_errors(self.dead_letters):
            sqs: Any = self.session.client("sqs")
            try:
                while messages := sqs.receive_message(
                    QueueUrl=self.dead_letters,
                    MaxNumberOfMessages=10,
                    VisibilityTimeout=_PEEK_SECONDS,
                    WaitTimeSeconds=1,
                ).get("Messages"):
                    new = [each for each in messages if each["MessageId"] not in seen]
                    seen |= {each["MessageId"]: each["ReceiptHandle"] for each in messages}
                    yield from ((each["MessageId"], each["Body"]) for each in new)
                    if not new:
                        break
            finally:
                for group in in_groups(list(seen.values()), 10):
                    entries = [
                        {"Id": str(number), "ReceiptHandle": handle, "VisibilityTimeout": 0}
                        for number, handle in enumerate(group)
                    ]
                    sqs.change_message_visibility_batch(QueueUrl=self.dead_letters, Entries=entries)

    def redrive(self) -> None:
        """Start to move the dead letters back to the queue.

        Raises:
            UserError: access is denied, or they are being moved already.
        """
        with translate_aws_errors(self.dead_letters):
            self.session.client("sqs").start_message_move_task(SourceArn=self.dead_letters_arn)

    def flush(self) -> dict[str, Any]:
        """Seal the staged samples and write the index; return what the function answers.

        Raises:
            UserError: the function cannot be invoked, or fails.
        """
        from botocore.config import Config

        # A second attempt would start another invocation while the first one runs.
        config = Config(read_timeout=INVOCATION_SECONDS + 10, retries={"total_max_attempts": 1})
        with translate_aws_errors(self.sealer):
            response: Any = self.session.client("lambda", config=config).invoke(
                FunctionName=self.sealer, Payload=json.dumps({"flush": True}).encode()
            )
            answer: dict[str, Any] = json.loads(response["Payload"].read() or b"{}")
        if "FunctionError" in response:
            reason = str(answer.get("errorMessage", response["FunctionError"]))
            raise UserError(f"{self.sealer}: {reason}", ExitCode.JOB_FAILED)
        return answer


def find_stack(session: boto3.Session, name: str) -> StreamStack:
    """Return the stack of this name in the session's region.

    Raises:
        UserError: there is none, or it was not made from `sm-train template pack-lambda`.
    """
    with translate_aws_errors(f"stack {name}"):
        client = session.client("cloudformation")
        [stack] = client.describe_stacks(StackName=name)["Stacks"]
    outputs = {entry["OutputKey"]: entry["OutputValue"] for entry in stack.get("Outputs", [])}
    parameters = {
        entry["ParameterKey"]: entry["ParameterValue"] for entry in stack.get("Parameters", [])
    }
    missing = [f"output {key}" for key in _OUTPUTS if key not in outputs]
    missing += [f"parameter {key}" for key in _PARAMETERS if key not in parameters]
    if missing:
        raise UserError(
            f"stack {name}: has no {missing[0]}; deploy it from `sm-train template pack-lambda`"
        )
    try:
        columns = DeclaredColumns.of(*(parameters[key] for key in ("Columns", "ColumnsFrom")))
    except ValueError as error:
        raise UserError(f"stack {name}: {error}") from None
    return StreamStack(
        name,
        session,
        parameters["RawBucket"],
        outputs["Destination"],
        int(parameters["ShardBytes"]),
        outputs["QueueUrl"],
        outputs["Rejected"],
        outputs["RejectedArn"],
        outputs["SealerName"],
        columns,
    )
