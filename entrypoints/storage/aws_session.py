"""Prepares every boto3 session of the product, and reads the errors of S3.

An answer that no AWS service gave is the page of a proxy, a portal or a wrong endpoint. botocore
takes such a page for an empty document if the protocol is JSON, and raises an exception outside of
its own hierarchy if it is XML (botocore 1.43, ``parsers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import boto3


from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


from typing import TYPE_CHECKING

from sm_train.entrypoints.storage.bucket_parameters import send_bucket_parameters

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


def error_code(error: ClientError) -> str:
    """Return the code that S3 answered with; that of a HEAD request is a status such as 404."""
    return error.response["Error"].get("Code", "")


def is_missing(error: ClientError) -> bool:
    """Return whether S3 reports that the object does not exist."""
    return error_code(error) in ("404", "NoSuchKey")


def is_condition_failed(error: ClientError) -> bool:
    """Return whether an object has changed since the ETag of the request, or exists by now.

    409 ConditionalRequestConflict: a concurrent put of the same key won.
    """
    codes = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
    return error_code(error) in codes


def is_busy(error: ClientError) -> bool:
    """Return whether S3 failed or throttles, so that the same request may succeed later."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status >= 500 or error_code(error) in ("SlowDown", "RequestTimeout", "503")


def is_aborted_upload(error: BaseException) -> bool:
    """Return whether S3 reports that the upload was aborted, by another process."""
    from botocore.exceptions import ClientError

    return isinstance(error, ClientError) and error_code(error) == "NoSuchUpload"


@contextmanager
def s3_errors_as_os_errors(address: str) -> Iterator[None]:
    """Raise errors of S3 and of the transfer as those of the file system, which name ``address``.

    Raises:
        FileNotFoundError: no such object.
        PermissionError: S3 denies access.
        OSError: any other error.
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except ClientError as error:
        if is_missing(error):
            raise FileNotFoundError(2, "no such object", address) from None
        if error_code(error) in ("403", "AccessDenied"):
            message = error.response["Error"].get("Message", "")
            raise PermissionError(13, f"S3 answers AccessDenied: {message}", address) from None
        again = "; run the same command again" if is_busy(error) else ""
        raise OSError(5, f"S3 answers {error_code(error)}{again}", address) from None
    except (BotoCoreError, HTTPClientError) as error:
        raise OSError(5, f"{error}; run the same command again", address) from None


def prepare_session(session: boto3.Session) -> None:
    """Make the session's clients name buckets' owners and keys, and refuse a proxy's page."""
    refuse_foreign_answers(session, send_bucket_parameters(session))
