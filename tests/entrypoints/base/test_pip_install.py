"""pip in a job uses the run file's package index: CodeArtifact, or an address."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sm_train.entrypoints.base.pip_install import index_variables

from tests.entrypoints.base.user_packages_support import write_wheel
from tests.support.fake_services import FakeRequest, FakeResponse, FakeServer, fake_server

REPOSITORY = "arn:aws:codeartifact:us-east-1:210987654321:repository/own/packages"
TOKEN = "temporary-token"


class Repository:
    """CodeArtifact's two calls and its package index, which needs the token as a password."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.url = wheel, ""

    def respond(self, request: FakeRequest) -> FakeResponse:
        if request.path == "/v1/authorization-token":
            assert request.query == {"domain": "own", "domain-owner": "210987654321"}
            return FakeResponse(content=json.dumps({"authorizationToken": TOKEN}).encode())
        if request.path == "/v1/repository/endpoint":
            assert request.query["repository"] == "packages"
            endpoint = {"repositoryEndpoint": f"{self.url}/pypi/packages/"}
            return FakeResponse(content=json.dumps(endpoint).encode())
        password = base64.b64encode(f"aws:{TOKEN}".encode()).decode()
        if request.headers.get("Authorization") != f"Basic {password}":
            return FakeResponse(401, headers={"WWW-Authenticate": 'Basic realm="packages"'})
        if request.path == "/pypi/packages/simple/smtown/":
            link = f'<a href="../../{self.wheel.name}">{self.wheel.name}</a>'
            page = f"<!doctype html><html><body>{link}</body></html>"
            return FakeResponse(content=page.encode(), headers={"Content-Type": "text/html"})
        if request.path == f"/pypi/packages/{self.wheel.name}":
            return FakeResponse(content=self.wheel.read_bytes())
        return FakeResponse(404)


def install(folder: Path, server: FakeServer, **variables: str) -> subprocess.CompletedProcess[str]:
    """Install the job's packages of ``folder`` as a node or a processing job does."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "sm_train.entrypoints.base.pip_install", "more.txt"],
        cwd=folder,
        env=kept
        | {
            "PIP_TARGET": str(folder / "site"),
            "PIP_TRUSTED_HOST": "127.0.0.1",
            "PIP_RETRIES": "0",
            "PIP_CONFIG_FILE": os.devnull,
            "AWS_ENDPOINT_URL_CODEARTIFACT": server.url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_MAX_ATTEMPTS": "1",
        }
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_packages_come_from_codeartifact_and_the_token_is_in_no_output(tmp_path: Path) -> None:
    import hashlib

    wheel = write_wheel(tmp_path)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "more.txt").write_text(f"smtown==1.0 --hash=sha256:{digest}\n")
    repository = Repository(wheel)
    with fake_server(repository.respond) as server:
        repository.url = server.url
        done = install(tmp_path, server, CA_REPOSITORY_ARN=REPOSITORY)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "site" / "smtown.py").exists()
        index = f"{server.url.replace('://', f'://aws:{TOKEN}@')}/pypi/packages/simple/"
        assert TOKEN not in done.stdout + done.stderr

        # A private index without a password is pip's own variable.
        other = install(tmp_path, server, PIP_INDEX_URL=index, PIP_UPGRADE="1")
        assert other.returncode == 0, other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("exists", [True, False])
def test_failure_is_one_line_with_its_reason(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "requirements.txt").write_text("smtown==9.9 --hash=sha256:" + "0" * 64 + "\n")
    repository = Repository(write_wheel(tmp_path))

    def refuse(request: FakeRequest) -> FakeResponse:
        error = {"__type": "AccessDeniedException", "message": "no"}
        return FakeResponse(403, json.dumps(error).encode())

    with fake_server(repository.respond if exists else refuse) as server:
        repository.url = server.url
        done = install(tmp_path, server, CA_REPOSITORY_ARN=REPOSITORY)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    if exists:
        reason = "exit code 1: No matching distribution found for smtown==9.9"
        assert last == f"error: pip install -r requirements.txt failed with {reason}"
    else:
        assert last.startswith(f"error: {REPOSITORY}: An error occurred (AccessDeniedException)")
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
def test_failure_is_the_reason_of_a_training_job(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("smtown==9.9 --hash=sha256:" + "0" * 64 + "\n")
    (tmp_path / "ml" / "input" / "config").mkdir(parents=True)
    repository = Repository(write_wheel(tmp_path))
    with fake_server(repository.respond) as server:
        repository.url = server.url
        base = {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
        done = install(tmp_path, server, CA_REPOSITORY_ARN=REPOSITORY, **base)
    assert done.returncode == 1
    reason = (tmp_path / "ml" / "output" / "failure").read_text()
    assert reason.startswith("pip install -r requirements.txt failed with exit code 1: No matching")


def test_jobs_without_a_repository_ask_nobody() -> None:
    assert index_variables({}) == {}
    assert index_variables({"PIP_INDEX_URL": "https://packages.example.com/simple/"}) == {}
