"""AWS on loopback: moto behind a real HTTP server that records calls and can change answers."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs

from sm_train.entrypoints.storage.aws_session import prepare_session

from tests.support.aws.policy_enforcement import (
    ACCOUNT,
    Permission,
    allowed,
    json_denial,
    needed_for_json,
    needed_for_query,
    needed_in_s3,
    query_denial,
)
from tests.support.aws.policy_simulator import simulate_principal_policy
from tests.support.background_server import serve_in_background
from tests.support.forked_commands.botocore_models import parse_models_once

if TYPE_CHECKING:
    import boto3

BACKENDS = ("s3", "sagemaker", "iam", "sts", "logs", "cloudwatch", "events", "sns")
"""Loaded when a pytest worker starts its first server, instead of in the middle of a test."""

os.environ["MOTO_ACCOUNT_ID"] = ACCOUNT
parse_models_once()

_SETUP_KEY = "test-setup"
"""Access key of the clients with which tests prepare an account and inspect it."""

_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

_LOST = b"<Error><Code>InternalError</Code><Message>Please try again.</Message></Error>"

_CHANGED = b"<Error><Code>PreconditionFailed</Code><Message>It has changed.</Message></Error>"


@dataclass
class Aws:
    """A moto server on loopback and the calls that it received."""

    url: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Operation and body of every call of a JSON protocol."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and query of every call of another protocol, such as S3's."""
    without_owner: list[str] = field(default_factory=list)
    """Every S3 request, except those of :meth:`client`, that did not name the bucket's owner."""
    bucket_owners: dict[str, str] = field(default_factory=dict)
    """Bucket → the account that owns it, if not :data:`ACCOUNT`."""
    required_keys: dict[str, str] = field(default_factory=dict)
    """Bucket → the KMS key without which its policy denies every new object."""
    policy: dict[str, Any] | None = None
    """The only policy of the caller, which is enforced; None allows every request."""
    checked: set[Permission] = field(default_factory=set)
    """The permissions that the requests needed, except those of :meth:`client`."""
    denied: list[Permission] = field(default_factory=list)
    """The permissions that requests needed and :attr:`policy` lacks."""
    denied_queries: set[str] = field(default_factory=set)
    """Subresources of S3, such as ``versions``, that the caller's policy denies."""
    loses_conditional_writes: bool = False
    """Whether the answer to the first attempt of each conditional write of S3 is lost after moto
    has carried it out."""
    lost: list[str] = field(default_factory=list)
    """The path of every conditional write whose answer was lost."""
    intercept: Callable[[str, str], tuple[int, bytes] | None] = lambda method, path: None
    """Is called with the method and the path of every call of another protocol than JSON, and may
    wait. It returns a status and a body, or None to let moto respond."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of what :attr:`intercept` returns."""
    error_codes: dict[str, str] = field(default_factory=dict)
    """Operation → the error code that the server returns."""
    response_filters: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = field(
        default_factory=dict
    )
    """Operation → a function that maps moto's response to the one to send; None drops the response
    after moto has carried out the operation."""
    responses: dict[str, Callable[[dict[str, Any]], tuple[int, dict[str, Any]] | None]] = field(
        default_factory=dict
    )
    """Operation → a function of the call's body, with the region as ``_region``, that returns a
    status and a body, or None to let moto respond."""

    def missing(self, environ: dict[str, Any], needed: Iterable[Permission]) -> Permission | None:
        """Record what a request needs; return the first permission that :attr:`policy` lacks."""
        if f"Credential={_SETUP_KEY}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return None
        permissions = list(needed)
        self.checked.update(permissions)
        if self.policy is None:
            return None
        lacking = [each for each in permissions if allowed(self.policy, *each) is None]
        self.denied += lacking
        return lacking[0] if lacking else None

    def bodies(self, operation: str) -> list[dict[str, Any]]:
        """Return the bodies of the calls of ``operation``, in order."""
        return [body for name, body in self.calls if name == operation]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that direct a process's AWS calls to this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """Return a boto3 client of this server."""
        import boto3

        return boto3.client(  # type: ignore[call-overload]
            service,
            region_name=region,
            endpoint_url=self.url,
            aws_access_key_id=_SETUP_KEY,
            aws_secret_access_key="testing",
        )

    def make_bucket(self, name: str, region: str = "us-east-1", **objects: bytes) -> None:
        """Create a bucket with ``objects``: key → content."""
        s3 = self.client("s3", region)
        location = (
            {}
            if region == "us-east-1"
            else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        )
        s3.create_bucket(Bucket=name, **location)
        for key, content in objects.items():
            s3.put_object(Bucket=name, Key=key, Body=content)

    def extend(self, bucket: str, key: str, size: int) -> None:
        """Give an object ``size`` bytes, in a sparse file."""
        from moto.backends import get_backend

        stored = get_backend("s3")[ACCOUNT]["aws"].get_object(bucket, key)
        stored._value_buffer.truncate(size)
        stored.contentsize = size

    def make_older(self, bucket: str, key: str, seconds: float) -> None:
        """Move the time at which an object was stored, which S3 itself sets, into the past."""
        from moto.backends import get_backend

        stored = get_backend("s3")[ACCOUNT]["aws"].buckets[bucket].keys
        [version] = [content for name, content in stored.items() if name == key]
        version.last_modified -= timedelta(seconds=seconds)


def aws_session(region: str = "us-east-1") -> boto3.Session:
    """Return a session with credentials, as ``open_session`` does without the environment."""
    import boto3

    session = boto3.Session("testing", "testing", region_name=region)
    prepare_session(session)
    return session


@contextmanager
def moto_server() -> Iterator[Aws]:
    """Serve an empty AWS account on loopback until the context ends."""
    from werkzeug.serving import make_server

    aws = Aws("")
    moto = moto_application()

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return _handle_request(aws, environ, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True)
    aws.url = f"http://127.0.0.1:{server.server_port}"
    with serve_in_background(server):
        _reset(moto)
        yield aws


@cache
def moto_application() -> Any:
    """Return moto's application; its routes are built once for each pytest worker."""
    from moto.backends import get_backend
    from moto.server import DomainDispatcherApplication, create_backend_app

    for name in BACKENDS:
        get_backend(name)  # type: ignore[call-overload]
        import_module(f"moto.{name}.urls")
    return DomainDispatcherApplication(create_backend_app)


def _reset(moto: Any) -> None:
    """Empty every account through moto's reset endpoint."""
    from werkzeug.test import Client

    response = Client(moto).post("/moto-api/reset", base_url="http://127.0.0.1")
    assert response.status_code == 200, response.text


def _handle_request(aws: Aws, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Record a call; return the response that the test configured, or moto's."""
    from werkzeug.test import run_wsgi_app

    moto = moto_application()
    target = environ.get("HTTP_X_AMZ_TARGET")
    if not target:
        query = environ.get("QUERY_STRING", "")
        aws.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], query))
        service = _service(environ)
        if service in ("iam", "sts", "sns", "cloudformation"):
            content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(content)
            if missing := aws.missing(environ, needed_for_query(service, content)):
                start_response("403 Forbidden", [("Content-Type", "text/xml")])
                return [query_denial(missing)]
            if b"Action=SimulatePrincipalPolicy" in content:
                status, document = simulate_principal_policy(content.decode(), ACCOUNT)
                start_response(f"{status} Simulated", [("Content-Type", "text/xml")])
                return [document]
        lacks_permission = service == "s3" and aws.missing(
            environ,
            needed_in_s3(
                environ["REQUEST_METHOD"],
                environ["PATH_INFO"],
                query,
                environ.get("HTTP_X_AMZ_COPY_SOURCE"),
            ),
        )
        is_denied = bool(lacks_permission) or not aws.denied_queries.isdisjoint(
            parse_qs(query, keep_blank_values=True)
        )
        intercepted = aws.intercept(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if intercepted is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            headers = {"Content-Type": "application/xml", **aws.headers}
            start_response(f"{intercepted[0]} Intercepted", [*headers.items()])
            return [intercepted[1]]
        if not _matches_the_etag(environ, query):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("412 Precondition Failed", [("Content-Type", "application/xml")])
            return [_CHANGED]
        if is_denied or not (_expects_the_owners(aws, environ) and _names_the_key(aws, environ)):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else _DENIED]
        if aws.loses_conditional_writes and _is_first_conditional_write(environ, query):
            pages, status, headers = run_wsgi_app(moto, environ)
            if not status.startswith("200"):
                start_response(status, [*headers])
                return pages
            aws.lost.append(environ["PATH_INFO"])
            start_response("500 Lost", [("Content-Type", "application/xml")])
            return [_LOST]
        if _is_conditional_write(environ, query):
            with _conditional_writes:
                return list(cast("Iterable[bytes]", moto(environ, start_response)))
        return cast("Iterable[bytes]", moto(environ, start_response))
    content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(content)
    operation, body = target.rsplit(".", 1)[-1], json.loads(content or b"{}")
    aws.calls.append((operation, body))
    # Only the signature of a call names its region.
    region = environ.get("HTTP_AUTHORIZATION", "//").split("/")[2]
    if missing := aws.missing(environ, needed_for_json(operation, body | {"_region": region})):
        return _respond(start_response, *json_denial(missing))
    if operation in aws.error_codes:
        error = {"__type": aws.error_codes[operation], "message": "rejected by the test"}
        return _respond(start_response, 400, error)
    response = aws.responses.get(operation, lambda _: None)(body | {"_region": region})
    if response is not None:
        return _respond(start_response, *response)
    if operation not in aws.response_filters:
        return cast("Iterable[bytes]", moto(environ, start_response))
    pages, status, headers = run_wsgi_app(moto, environ)
    filtered = aws.response_filters[operation](json.loads(b"".join(pages)))
    if filtered is None:
        start_response("500 Lost", [])
        return [b""]
    headers.remove("Content-Length")
    start_response(status, headers.to_wsgi_list())
    return [json.dumps(filtered).encode()]


def _service(environ: dict[str, Any]) -> str:
    """Return the service that a request is signed for: Credential=KEY/DATE/REGION/SERVICE/..."""
    parts = environ.get("HTTP_AUTHORIZATION", "").split(",")[0].split("/")
    return str(parts[3]) if len(parts) > 3 else ""


def _is_first_conditional_write(environ: dict[str, Any], query: str) -> bool:
    """Return whether this is the first attempt (AWS SDKs number them) of a conditional write."""
    attempt = environ.get("HTTP_AMZ_SDK_REQUEST", "").split(";")[0]
    return _is_conditional_write(environ, query) and attempt == "attempt=1"


_conditional_writes = threading.Lock()
"""S3 compares and writes in one step; moto's threads may compare before either has written."""


def _is_conditional_write(environ: dict[str, Any], query: str) -> bool:
    is_conditional = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
    completes = environ["REQUEST_METHOD"] == "POST" and "uploadId=" in query
    return is_conditional and (environ["REQUEST_METHOD"] == "PUT" or completes)


def _matches_the_etag(environ: dict[str, Any], query: str) -> bool:
    """Return whether an upload in parts may be completed, as S3 decides it; moto does not."""
    expected = environ.get("HTTP_IF_MATCH")
    if environ["REQUEST_METHOD"] != "POST" or expected is None or "uploadId=" not in query:
        return True
    from moto.backends import get_backend

    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    stored = get_backend("s3")[ACCOUNT]["aws"].get_object(bucket, key)
    return stored is not None and bool(stored.etag == expected)


def _expects_the_owners(aws: Aws, environ: dict[str, Any]) -> bool:
    """Return whether a request expects the right owners, as S3 does; record one without owners."""
    # Credential=KEY/DATE/REGION/SERVICE/aws4_request
    scope = environ.get("HTTP_AUTHORIZATION", "////").split(",")[0].split("/")
    path, query = environ["PATH_INFO"].lstrip("/"), environ.get("QUERY_STRING", "")
    bucket, _, key = path.partition("/")
    creates_bucket = environ["REQUEST_METHOD"] == "PUT" and not key and not query
    takes_no_owner = not bucket or creates_bucket  # ListBuckets, CreateBucket
    if scope[3] != "s3" or scope[0].endswith(_SETUP_KEY) or takes_no_owner:
        return True
    expected = [(bucket, environ.get("HTTP_X_AMZ_EXPECTED_BUCKET_OWNER"))]
    if source := environ.get("HTTP_X_AMZ_COPY_SOURCE"):
        owner = environ.get("HTTP_X_AMZ_SOURCE_EXPECTED_BUCKET_OWNER")
        expected.append((source.lstrip("/").partition("/")[0], owner))
    if any(owner is None for _, owner in expected):
        aws.without_owner.append(f"{environ['REQUEST_METHOD']} {path}?{query}")
    return all(
        owner in (None, aws.bucket_owners.get(bucket, ACCOUNT)) for bucket, owner in expected
    )


def _names_the_key(aws: Aws, environ: dict[str, Any]) -> bool:
    """Return whether the bucket's policy allows a request, if that creates an object.

    Such a policy denies s3:PutObject unless s3:x-amz-server-side-encryption and its key ID are as
    required (Amazon S3 user guide, Requiring SSE-KMS, read 2026-11). Parts carry neither.
    """
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    starts_upload = method == "POST" and query.split("&")[0] in ("uploads", "uploads=")
    creates = bool(key) and (starts_upload or (method == "PUT" and "partNumber" not in query))
    scope = environ.get("HTTP_AUTHORIZATION", "").split("/")[0]
    if bucket not in aws.required_keys or not creates or scope.endswith(_SETUP_KEY):
        return True
    sent = (
        environ.get("HTTP_X_AMZ_SERVER_SIDE_ENCRYPTION"),
        environ.get("HTTP_X_AMZ_SERVER_SIDE_ENCRYPTION_AWS_KMS_KEY_ID"),
    )
    return sent == ("aws:kms", aws.required_keys[bucket])


def _respond(start_response: Any, status: int, body: dict[str, Any]) -> list[bytes]:
    start_response(f"{status} ", [("Content-Type", "application/x-amz-json-1.1")])
    return [json.dumps(body).encode()]
