"""A local HTTP server that speaks the part of the Hugging Face Hub's API that the toolkit uses.

``HF_ENDPOINT`` points huggingface_hub to it: creating repositories, commits of regular files, model
information with sizes and digests, and downloads with ranges.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.background_server import serve_in_background

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hub-test-token"


@dataclass
class Hub:
    """Repositories by name, each its files by path; ``gated`` ones refuse readers."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: dict[str, bool] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    tokens: set[str] = field(default_factory=set)
    """Tokens that requests carried."""
    cut_after: int | None = None
    """Bytes after which the next download's connection ends."""
    sent: int = 0
    """Bytes of file contents that were sent."""

    def environment(self, home: str) -> dict[str, str]:
        """Return variables for a command that uses this server, with an empty cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": home,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve an empty Hub on loopback."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    with serve_in_background(server):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        path = self._begin()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
            self.state.repositories.setdefault(name, {})
            self.state.private[name] = (
                wanted.get("private") or wanted.get("visibility") == "private"
            )
            self._json({"url": f"{self.state.url}/{name}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in files
            ]
            self._json({"files": modes})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    content = base64.b64decode(value["content"])
                    self.state.repositories[match[1]][value["path"]] = content
            url = f"{self.state.url}/{match[1]}/commit/{COMMIT}"
            self._json({"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self._json({"error": f"unknown {path}"}, 404)

    def do_HEAD(self) -> None:
        self._get(head=True)

    def do_GET(self) -> None:
        self._get(head=False)

    def _begin(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((self.command, path))
        if token := self.headers.get("Authorization", "").removeprefix("Bearer "):
            self.state.tokens.add(token)
        return path

    def _get(self, *, head: bool) -> None:
        path = self._begin()
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            self._model_info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[3], head=head)
        else:
            self._json({"error": f"unknown {path}"}, 404)

    def _refused(self, name: str) -> bool:
        if name not in self.state.repositories:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif name in self.state.gated:
            self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
        else:
            return False
        return True

    def _model_info(self, name: str, revision: str) -> None:
        if self._refused(name):
            return
        if revision not in ("main", "v1", COMMIT):
            self._json({"error": "Revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.state.repositories[name]
        siblings = [
            {
                "rfilename": path,
                "size": len(content),
                "blobId": hashlib.sha1(content).hexdigest(),
                **(
                    {"lfs": {"sha256": digest(content), "size": len(content), "pointerSize": 130}}
                    if path.endswith(".safetensors")
                    else {}
                ),
            }
            for path, content in files.items()
        ]
        self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []})

    def _file(self, name: str, path: str, *, head: bool) -> None:
        if self._refused(name):
            return
        content = self.state.repositories[name].get(path)
        if content is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        status, start, end = 200, 0, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, start = 206, int(match[1])
            end = min(end, int(match[2]) + 1) if match[2] else end
        part = content[start:end]
        self.send_response(status)
        self.send_header("ETag", f'"{digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if head:
            return
        if self.state.cut_after is not None and len(part) > self.state.cut_after:
            part, self.state.cut_after = part[: self.state.cut_after], None
            self.close_connection = True
        self.state.sent += len(part)
        self.wfile.write(part)

    def _json(
        self, document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
            self.send_header("X-Error-Message", document["error"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
