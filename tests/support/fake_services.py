"""Fake services on loopback: those moto lacks, or whose responses would be too large for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.background_server import serve_in_background


@dataclass(frozen=True)
class FakeRequest:
    method: str
    path: str
    query: dict[str, str]
    headers: Message
    body: bytes


@dataclass(frozen=True)
class FakeResponse:
    status: int = 200
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeServer:
    """A server's URL and the requests it has received."""

    url: str
    requests: list[FakeRequest] = field(default_factory=list)


@contextmanager
def fake_server(respond: Callable[[FakeRequest], FakeResponse]) -> Iterator[FakeServer]:
    """Run an HTTP server on loopback that responds by a function."""
    fake = FakeServer("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = FakeRequest(self.command, unquote(parts.path), query, self.headers, body)
            fake.requests.append(request)
            response = respond(request)
            self.send_response(response.status)
            for key, value in (
                {"Content-Length": str(len(response.content))} | response.headers
            ).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.content)

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: a test's output is its failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    with serve_in_background(server):
        yield fake


def fake_service_quotas(values: Mapping[str, float]) -> Callable[[FakeRequest], FakeResponse]:
    """Return ListServiceQuotas over ``values`` by name, with 100 to a page like the service."""
    quotas = [
        {"QuotaName": name, "QuotaCode": f"L-{number:08X}", "Value": value}
        for number, (name, value) in enumerate(values.items())
    ]

    def respond(request: FakeRequest) -> FakeResponse:
        parameters = json.loads(request.body)
        first = int(parameters.get("NextToken", 0))
        size = parameters.get("MaxResults", 100)
        page: dict[str, Any] = {"Quotas": quotas[first : first + size]}
        if first + size < len(quotas):
            page["NextToken"] = str(first + size)
        return FakeResponse(content=json.dumps(page).encode())

    return respond


def fake_bucket(
    sizes: Mapping[str, int], contents: Mapping[str, bytes], region: str = "us-east-1"
) -> Callable[[FakeRequest], FakeResponse]:
    """Return a bucket: objects of any size that can be listed, some of which can be read."""
    keys = sorted({**sizes, **{key: len(value) for key, value in contents.items()}}.items())

    def respond(request: FakeRequest) -> FakeResponse:
        _, _, key = request.path.lstrip("/").partition("/")
        if key:
            return _get_object(contents.get(key), request)
        return replace(_list_objects(keys, request.query), headers={"x-amz-bucket-region": region})

    return respond


def _get_object(content: bytes | None, request: FakeRequest) -> FakeResponse:
    if content is None:
        return FakeResponse(404)
    if request.method == "HEAD":
        modified = "Fri, 20 Nov 2026 00:00:00 GMT"
        headers = {"Content-Length": str(len(content)), "ETag": '"0"', "Last-Modified": modified}
        return FakeResponse(headers=headers)
    first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
    return FakeResponse(206, content[int(first) : int(last) + 1])


def _list_objects(keys: list[tuple[str, int]], query: dict[str, str]) -> FakeResponse:
    prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
    page_size = int(query.get("max-keys", 1000))
    matching = [(key, size) for key, size in keys if key.startswith(prefix) and key > after]
    page = matching[:page_size]
    more = len(matching) > page_size
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-20T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;0&quot;</ETag><Size>{size}</Size></Contents>"
        for key, size in page
    )
    token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
    return FakeResponse(
        content=(
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{entries}</ListBucketResult>"
        ).encode()
    )


def deny_all(code: str) -> Callable[[FakeRequest], FakeResponse]:
    """Return a service of the query protocol, such as IAM, that rejects every request."""
    content = (
        f"<ErrorResponse><Error><Code>{code}</Code><Message>no</Message></Error></ErrorResponse>"
    )
    return lambda request: FakeResponse(403, content.encode())


def fake_policy_simulator(allowed: Collection[str]) -> Callable[[FakeRequest], FakeResponse]:
    """Return IAM's SimulatePrincipalPolicy, which allows actions on ``allowed`` resources."""

    def respond(request: FakeRequest) -> FakeResponse:
        fields = {key: values[0] for key, values in parse_qs(request.body.decode()).items()}
        assert fields["Action"] == "SimulatePrincipalPolicy", fields
        resource = fields["ResourceArns.member.1"]
        decision = "allowed" if resource in allowed else "implicitDeny"
        return FakeResponse(
            content=(
                "<SimulatePrincipalPolicyResponse><SimulatePrincipalPolicyResult>"
                "<IsTruncated>false</IsTruncated><EvaluationResults><member>"
                f"<EvalActionName>{fields['ActionNames.member.1']}</EvalActionName>"
                f"<EvalResourceName>{escape(resource)}</EvalResourceName>"
                f"<EvalDecision>{decision}</EvalDecision></member></EvaluationResults>"
                "</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"
            ).encode()
        )

    return respond
