"""Shared fixtures: the command line as a user runs it, AWS on loopback, small file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from sm_train.entrypoints.storage import store
from sm_train.entrypoints.storage.bucket_settings import KEYS_VARIABLE, OWNERS_VARIABLE

from tests.support.capabilities import skip_or_fail
from tests.support.deadline import DEADLINE
from tests.support.forked_commands import cli_server
from tests.support.moto_server import Aws, moto_server
from tests.tiers.cpu_time import CpuTime

if TYPE_CHECKING:
    from selenium import webdriver

# Deadlines per example would fail on a loaded CPU.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

Cli = Callable[..., subprocess.CompletedProcess[str]]
Mount = Callable[[str], Path]

# A forbidden call exits the process at once, because the program could catch an exception.
_NO_NETWORK = """
import os, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        os.write(2, f"used the network: {event} {arguments[1:]}".encode())
        os._exit(97)
sys.addaudithook(refuse)
"""
_LOOPBACK_ONLY = """
import os, sys
def refuse(event, arguments):
    host = arguments[1][0] if event == "socket.connect" and isinstance(arguments[1], tuple) else ""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    if host not in ("", "127.0.0.1", "localhost", "::1", None):
        os.write(2, f"connected beyond loopback: {event} {host}".encode())
        os._exit(97)
sys.addaudithook(refuse)
"""
_BROWSER_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
_PRELUDES = {"none": _NO_NETWORK, "loopback": _LOOPBACK_ONLY}


def pytest_configure(config: pytest.Config) -> None:
    """Measure the processor time of every test."""
    config.pluginmanager.register(CpuTime())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how often tests were retried: only those with ``pytest.mark.flaky`` are."""
    retried = [report.nodeid for report in terminalreporter.stats.get("rerun", ())]
    terminalreporter.write_line(f"retried: {len(retried)} {' '.join(retried)}".rstrip())


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep code that runs in this process out of the user's home folder and configuration."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``sm-train`` in a separate process, without credentials, home folder or configuration.

    ``network="none"`` fails the command on any use of a socket, ``"loopback"`` on any connection
    to another address than loopback.
    """

    def run(
        *arguments: str | Path,
        network: str = "none",
        env: dict[str, str] | None = None,
        cwd: Path = tmp_path,
        stdin: str | None = None,
        timeout: float = DEADLINE,
    ) -> subprocess.CompletedProcess[str]:
        done = cli_server.run(
            _PRELUDES[network],
            [str(argument) for argument in arguments],
            env=clean_environment(tmp_path) | (env or {}),
            cwd=cwd,
            stdin=stdin or "",
            timeout=timeout,
        )
        # It changes no exit code.
        assert "Exception in thread" not in done.stderr, done.stderr
        return done

    return run


def clean_environment(home: Path) -> dict[str, str]:
    """Return this process's environment with another home folder and without AWS's variables."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("AWS_", "SM_TRAIN_", "XDG_"))
    }
    return kept | {"HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", "COLUMNS": "100"}


@pytest.fixture
def aws() -> Iterator[Aws]:
    """Serve an empty AWS account on loopback that records every call.

    Every S3 request of the code under test must expect the bucket's owner.
    """
    store._open_store.cache_clear()
    with pytest.MonkeyPatch.context() as environment, moto_server() as server:
        for variable in (OWNERS_VARIABLE, KEYS_VARIABLE):
            environment.setenv(variable, "")  # commands in this process declare their buckets
        yield server
        assert server.without_owner == []


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts a tmpfs with the given options; skip without permission."""
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        folder = tmp_path / f"mount-{len(mounted)}"
        folder.mkdir()
        run = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {run.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount_tmpfs
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Start headless Chromium that logs console messages and requests; skip without it."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        skip_or_fail("chromium or chromedriver is not installed", "REQUIRE_BROWSER")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in _BROWSER_FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()
