"""The part of a W&B server that its client needs to log a run, on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.background_server import serve_in_background


@dataclass
class WandbServer:
    """One run: its ``history`` rows and its ``summary``; ``authorizations`` of all requests."""

    url: str = ""
    run_id: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    authorizations: list[str | None] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def respond(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL operation."""
        if "ServerFeaturesQuery" in query:
            return {"serverInfo": {"features": []}}
        if "RunResumeStatus" in query:
            return {"model": {**_PROJECT, "bucket": self._resumable()}}
        if "UpsertBucket" in query:
            self.run_id = variables["name"]
            self.config |= json.loads(variables["config"] or "{}")
            bucket = {
                "id": "run",
                "name": self.run_id,
                "displayName": self.run_id,
                "description": None,
                "config": json.dumps(self.config),
                "sweepName": None,
                "project": _PROJECT,
                "historyLineCount": len(self.history),
            }
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}
        if "CreateRunFiles" in query:
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []}}
        return {}

    def _resumable(self) -> dict[str, Any] | None:
        if not self.history:
            return None
        tail = json.dumps([json.dumps(self.history[-1])])
        return {
            "id": "run",
            "name": self.run_id,
            "summaryMetrics": json.dumps(self.summary),
            "displayName": self.run_id,
            "logLineCount": 0,
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "historyTail": tail,
            "eventsTail": "[]",
            "config": json.dumps(self.config),
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }

    def stream(self, body: dict[str, Any]) -> None:
        """Take note of rows, the summary and the end."""
        files = body.get("files") or {}
        for line in files.get("wandb-history.jsonl", {}).get("content", []):
            self.history.append(json.loads(line))
        for line in files.get("wandb-summary.json", {}).get("content", []):
            self.summary = json.loads(line)
        if "exitcode" in body and body.get("complete"):
            self.exit_codes.append(body["exitcode"])


_PROJECT = {"id": "project", "name": "project", "entity": {"id": "entity", "name": "team"}}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    state = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.authorizations.append(self.headers.get("Authorization"))
            data: dict[str, Any] = {}
            if self.path == "/graphql":
                request = json.loads(body)
                data = state.respond(request["query"], request.get("variables") or {})
            elif self.path.endswith("/file_stream"):
                state.stream(json.loads(body))
            content = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    with serve_in_background(server):
        yield state
