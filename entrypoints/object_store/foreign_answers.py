"""Recognizes answers that no AWS service gave: the page of a proxy, a portal or a wrong endpoint.

botocore takes such a page for an empty document if the protocol is JSON, and raises an exception
outside of its own hierarchy if it is XML (botocore 1.43, ``parsers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import boto3


def refuse_foreign_answers(session: boto3.Session, s3_address: Callable[[], str]) -> None:
    """Make the clients that ``session`` creates from now on refuse a page in place of a document.

    The exception is a ``BotoCoreError`` that names the operation, for S3 also the object, and the
    HTTP status. A page with a server's error (status 500 or higher) counts as that error, so it is
    retried.
    """

    def check(response_dict: dict[str, Any], operation_model: Any, **_: Any) -> None:
        is_s3 = operation_model.service_model.service_name == "s3"
        asked = f"{operation_model.name} of {s3_address()}" if is_s3 else operation_model.name
        _check_answer(response_dict, asked)

    session.events.register("before-parse", check)


def _check_answer(response_dict: dict[str, Any], asked: str) -> None:
    body = response_dict.get("body")
    if not isinstance(body, bytes) or not _is_page(body):
        return
    status = response_dict["status_code"]
    if status >= 500:
        response_dict["body"] = b""  # botocore reads a body-less error as its HTTP status
        return
    from botocore.exceptions import BotoCoreError

    class ForeignAnswerError(BotoCoreError):
        fmt = (
            "the answer to {operation} is no AWS document but {kind} (HTTP {status}); check the "
            "proxy and the network of this machine, and AWS_ENDPOINT_URL"
        )

    raise ForeignAnswerError(
        operation=asked, status=status, kind=_kind(response_dict.get("headers", {}))
    )


def _is_page(body: bytes) -> bool:
    return body[:64].lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _kind(headers: Mapping[str, str]) -> str:
    server = headers.get("server", "")
    return f"a web page of {server[:40]}" if server.isprintable() and server else "a web page"
