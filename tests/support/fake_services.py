"""Services on loopback that moto lacks, or whose answers would be too large for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: Message
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int = 200
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class StandIn:
    """A server and what was asked of it."""

    url: str
    requests: list[Request] = field(default_factory=list)


@contextmanager
def serving(answer: Callable[[Request], Answer]) -> Iterator[StandIn]:
    """An HTTP server on loopback that answers by a function."""
    stand_in = StandIn("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, unquote(parts.path), query, self.headers, body)
            stand_in.requests.append(request)
            answered = answer(request)
            self.send_response(answered.status)
            for key, value in (
                {"Content-Length": str(len(answered.content))} | answered.headers
            ).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answered.content)

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test's output is its failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def service_quotas(values: Mapping[str, float]) -> Callable[[Request], Answer]:
    """ListServiceQuotas over ``values`` by name, 100 to a page as the service has them."""
    quotas = [
        {"QuotaName": name, "QuotaCode": f"L-{number:08X}", "Value": value}
        for number, (name, value) in enumerate(values.items())
    ]

    def answer(request: Request) -> Answer:
        asked = json.loads(request.body)
        first, size = int(asked.get("NextToken", 0)), asked.get("MaxResults", 100)
        page: dict[str, Any] = {"Quotas": quotas[first : first + size]}
        if first + size < len(quotas):
            page["NextToken"] = str(first + size)
        return Answer(content=json.dumps(page).encode())

    return answer


def bucket_of(
    sizes: Mapping[str, int], contents: Mapping[str, bytes], region: str = "us-east-1"
) -> Callable[[Request], Answer]:
    """One bucket: objects of any size to be listed, 1,000 to a page, and some to be read."""
    keys = sorted({**sizes, **{key: len(value) for key, value in contents.items()}}.items())

    def answer(request: Request) -> Answer:
        _, _, key = request.path.lstrip("/").partition("/")
        if key:
            return _object(contents.get(key), request)
        if request.method == "HEAD":
            return Answer(headers={"x-amz-bucket-region": region})
        return _listed(keys, request.query)

    return answer


def _object(content: bytes | None, request: Request) -> Answer:
    if content is None:
        return Answer(404)
    if request.method == "HEAD":
        return Answer(headers={"Content-Length": str(len(content))})
    first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
    return Answer(206, content[int(first) : int(last) + 1])


def _listed(keys: list[tuple[str, int]], query: dict[str, str]) -> Answer:
    prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
    most = int(query.get("max-keys", 1000))
    below = [(key, size) for key, size in keys if key.startswith(prefix) and key > after]
    page = below[:most]
    more = len(below) > most
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>" for key, size in page
    )
    token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
    return Answer(
        content=(
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{entries}</ListBucketResult>"
        ).encode()
    )


def refusing(code: str) -> Callable[[Request], Answer]:
    """A service of the query protocol, such as IAM, that refuses whatever is asked."""
    content = (
        f"<ErrorResponse><Error><Code>{code}</Code><Message>no</Message></Error></ErrorResponse>"
    )
    return lambda request: Answer(403, content.encode())
