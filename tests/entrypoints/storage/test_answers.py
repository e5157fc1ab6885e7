"""What each reader of S3 makes of each answer: an error is no absence, a cut body no content.

The server on loopback is a real one: it closes connections, cuts bodies and ignores ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import pytest
from botocore.config import Config
from sm_train.entrypoints.clusters.prefix_copy import PrefixFiles
from sm_train.entrypoints.storage import store as object_store
from sm_train.entrypoints.storage.aws_session import prepare_session
from sm_train.entrypoints.storage.bucket_settings import ACCOUNT_VARIABLE
from sm_train.entrypoints.storage.lease_files import S3LeaseFiles
from sm_train.entrypoints.storage.object_file import ObjectBytes, open_object
from sm_train.entrypoints.storage.storage import S3Prefix
from sm_train.entrypoints.storage.store import ObjectStore, S3Access, StoredObject, store_of
from sm_train.toolkit.aws import s3_download
from sm_train.toolkit.aws.aws_errors import as_user_error
from sm_train.toolkit.aws.s3 import read_optional_object

from tests.support.background_server import serve_in_background

pytestmark = pytest.mark.integration

BUCKET, KEY, CONTENT = "ai-bucket", "photos/0.jpg", bytes(range(256)) * 8
ADDRESS = f"s3://{BUCKET}/{KEY}"
ERROR = "<Error><Code>{}</Code><Message>no</Message></Error>"
LISTED = (
    "<ListBucketResult><Name>ai-bucket</Name><IsTruncated>false</IsTruncated><Contents>"
    f"<Key>{KEY}</Key><LastModified>2026-11-29T00:00:00Z</LastModified><ETag>&quot;e&quot;</ETag>"
    f"<Size>{len(CONTENT)}</Size></Contents></ListBucketResult>"
)
EMPTY = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"

ANSWERS = ("absent", "denied", "slow down", "error 500", "cut", "wrong length", "lost", "page")
"""What S3, or what is between, answers to every request for the object."""

STATUS = {
    "absent": (404, "NoSuchKey"),
    "denied": (403, "AccessDenied"),
    "slow down": (503, "SlowDown"),
    "error 500": (500, "InternalError"),
}


@dataclass
class Answering:
    """The answer to the next ``times`` requests; then the object is sent as it is."""

    answer: str = ""
    times: int = 0
    requests: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Sends S3's answer, or the one that the plan states."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        plan, parts = self.server.plan, urlsplit(self.path)
        plan.requests.append(f"{self.command} {self.path}")
        answer = plan.answer if plan.times > 0 else ""
        plan.times -= 1
        if "list-type" in parse_qs(parts.query):
            content, span = (EMPTY if answer == "absent" else LISTED).encode(), ""
        else:
            assert unquote(parts.path) == f"/{BUCKET}/{KEY}"
            content, span = self._range()
        if answer == "lost":
            self.close_connection = True
        elif answer == "page":
            self._send(403, b"<!doctype html><html>blocked</html>")
        elif answer in STATUS and not (answer == "absent" and "list-type" in parts.query):
            status, code = STATUS[answer]
            self._send(status, ERROR.format(code).encode())
        elif answer == "wrong length" and span:
            self._send(200, CONTENT)  # the range is ignored
        else:
            # Without the last byte, but with the length of all.
            is_cut = answer in ("cut", "wrong length")
            self._send(206 if span else 200, content, span, cut=is_cut)

    do_HEAD = do_GET  # noqa: N815

    def _range(self) -> tuple[bytes, str]:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return CONTENT, ""
        start, end = int(asked[1]), min(int(asked[2] or len(CONTENT)), len(CONTENT) - 1)
        return CONTENT[start : end + 1], f"bytes {start}-{end}/{len(CONTENT)}"

    def _send(self, status: int, content: bytes, span: str = "", *, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", formatdate(usegmt=True))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:-1] if cut else content)
            self.close_connection = cut

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan = Answering()


@dataclass(frozen=True)
class Place:
    """How readers reach the object."""

    session: boto3.Session
    store: ObjectStore
    folder: Path
    plan: Answering


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with serve_in_background(server := Server()):
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
            ACCOUNT_VARIABLE: "111122223333",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "_PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(s3_download, "_PAUSE_SECONDS", 0.0)
        session = boto3.Session("testing", "testing", region_name="us-east-1")
        prepare_session(session)
        config = Config(
            retries={"total_max_attempts": 2}, response_checksum_validation="when_required"
        )
        store = store_of(session, config=config)
        monkeypatch.setattr(object_store, "_open_store", lambda access: store)
        yield Place(session, store, tmp_path, server.plan)


def read_file(place: Place) -> bytes:
    with open_object(place.store, ADDRESS) as file:
        return file.read()


def downloaded(place: Place) -> bytes:
    place.store.download(BUCKET, KEY, place.folder / "downloaded")
    return (place.folder / "downloaded").read_bytes()


def downloaded_together(place: Place) -> bytes:
    stored = next(place.store.objects(BUCKET, "photos/"), None)
    if stored is None:
        raise FileNotFoundError(2, "not listed", ADDRESS)
    path = place.folder / "model" / "0.jpg"
    s3_download.download_all(place.store, BUCKET, [(stored, path)], lambda done: None)
    return path.read_bytes()


def downloaded_to_a_node(place: Place) -> bytes:
    PrefixFiles(f"s3://{BUCKET}/photos/").download(["0.jpg"], place.folder)
    return (place.folder / "0.jpg").read_bytes()


def first(place: Place) -> str | None:
    found = place.store.first(BUCKET, "photos/")
    return None if found is None else found.key


PREFIX = S3Prefix(BUCKET, "photos/", S3Access())

CONTENT_READERS: dict[str, Callable[[Place], bytes | None]] = {
    "get": lambda place: place.store.get(BUCKET, KEY),
    "get_if_exists": lambda place: getattr(place.store.get_if_exists(BUCKET, KEY), "content", None),
    "get_range": lambda place: place.store.get_range(BUCKET, KEY, 1, len(CONTENT) - 2),
    "read": lambda place: place.store.read(BUCKET, KEY),
    "download": downloaded,
    "object file": read_file,
    "object bytes": lambda place: ObjectBytes(place.store, BUCKET, KEY, len(CONTENT)).pread(9, 3),
    "download_all": downloaded_together,
    "lease file": lambda place: getattr(
        S3LeaseFiles(place.store, BUCKET, "photos/").read("0.jpg"), "content", None
    ),
    "storage": lambda place: PREFIX.read("0.jpg"),
    "stored file": lambda place: PREFIX.open("0.jpg").read(),
    "laptop": lambda place: read_optional_object(place.session, ADDRESS, "the record"),
    "node": downloaded_to_a_node,
}
OTHER_READERS: dict[str, Callable[[Place], object]] = {
    "head": lambda place: getattr(place.store.head(BUCKET, KEY), "bytes", None),
    "size": lambda place: PREFIX.size("0.jpg"),
    "first": first,
    "objects": lambda place: [stored.key for stored in place.store.objects(BUCKET, "photos/")],
    "sizes": lambda place: PREFIX.list_sizes(""),
    "has files": lambda place: (
        PREFIX.has_files("") if place.store.first(BUCKET, "photos/") is not None else None
    ),
}
READERS = CONTENT_READERS | OTHER_READERS

RIGHT: dict[str, object] = dict.fromkeys(CONTENT_READERS, CONTENT) | {
    "get_range": CONTENT[1:-1],
    "object bytes": CONTENT[3:12],
    "head": len(CONTENT),
    "size": len(CONTENT),
    "first": KEY,
    "objects": [KEY],
    "sizes": {"0.jpg": len(CONTENT)},
    "has files": True,
}

ABSENT: dict[str, object] = {
    **dict.fromkeys(("get_if_exists", "lease file", "laptop", "head", "size", "first"), None),
    "has files": None,
    "objects": [],
    "sizes": {},
}
"""What readers that answer the question whether an object exists say when it does not."""


def answer_of(reader: str, place: Place) -> object:
    """Return what a reader returns, or the line that a user reads of its error."""
    try:
        return READERS[reader](place)
    except Exception as error:
        if isinstance(error, OSError):
            return f"{error.filename}: {error.strerror}"
        return str(error) if "UserError" in f"{type(error).__mro__}" else str(as_user_error(error))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_reader_knows_every_answer(reader: str, answer: str, place: Place) -> None:
    place.plan.answer, place.plan.times = answer, 1_000_000
    found = answer_of(reader, place)
    has_no_body = reader in ("head", "size")
    if answer == "absent":
        if reader in ABSENT:
            assert found == ABSENT[reader]
        else:
            assert isinstance(found, str)
            assert re.search("no such object|NoSuchKey|404|not listed|Not Found", found), found
    elif answer in ("cut", "wrong length") and has_no_body:
        assert found == RIGHT[reader]  # the header of a HEAD answer is whole
    elif answer == "page" and has_no_body:
        assert isinstance(found, str)
    elif answer == "wrong length" and found == RIGHT[reader]:
        # The range was the whole object, which is right without one.
        assert reader in ("read", "download", "storage", "node", "download_all")
    else:
        assert isinstance(found, str), "an error is neither content nor absence"
        assert found != RIGHT[reader]
        assert BUCKET in found, found
        if answer in ("slow down", "error 500", "cut"):
            assert "again" in found, found
        if answer == "denied":
            assert "denied" in found.lower() or "403" in found, found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("answer", ["slow down", "error 500", "cut", "lost"])
def test_every_reader_asks_again_once(reader: str, answer: str, place: Place) -> None:
    place.plan.answer, place.plan.times = answer, 1
    assert answer_of(reader, place) == RIGHT[reader]
    assert len(place.plan.requests) > 1 or reader in ("head", "size")


def test_stored_object_is_what_the_table_reads(place: Place) -> None:
    [stored] = place.store.objects(BUCKET, "photos/")
    assert stored == StoredObject(KEY, len(CONTENT), '"e"', stored.modified)
    assert {reader: answer_of(reader, place) for reader in READERS} == RIGHT
