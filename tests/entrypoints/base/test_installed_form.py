"""The command that adds an extra names what was installed: a folder, a wheel, a repository."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.base import pip_install as installed_form
from sm_train.entrypoints.base.pip_install import install_command

# Records as pip 26.3 writes them, and as PEP 610 has them for a version control system.
FORMS: list[tuple[dict[str, Any] | None, str]] = [
    (None, 'pip install "sm-train[aws]"'),
    (
        {"url": "file:///home/ada/sm-train", "dir_info": {}},
        'pip install "/home/ada/sm-train[aws]"',
    ),
    (
        {"url": "file:///home/ada/my%20code", "dir_info": {"editable": True}},
        'pip install -e "/home/ada/my code[aws]"',
    ),
    (
        {"url": "file:///tmp/sm_train-0.1.0-py3-none-any.whl", "archive_info": {"hashes": {}}},
        'pip install "/tmp/sm_train-0.1.0-py3-none-any.whl[aws]"',
    ),
    (
        {"url": "https://example.com/sm_train-0.1.0-py3-none-any.whl", "archive_info": {}},
        'pip install "sm-train[aws] @ https://example.com/sm_train-0.1.0-py3-none-any.whl"',
    ),
    (
        {
            "url": "https://example.com/sm-train.git",
            "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "7a38ba0"},
        },
        'pip install "sm-train[aws] @ git+https://example.com/sm-train.git@main"',
    ),
    (
        {
            "url": "https://example.com/{x}.git",
            "vcs_info": {"vcs": "git", "commit_id": "7a38ba0"},
        },
        'pip install "sm-train[aws] @ git+https://example.com/{x}.git@7a38ba0"',
    ),
]


@pytest.mark.parametrize(("recorded", "command"), FORMS)
def test_command_names_what_was_installed(
    recorded: dict[str, Any] | None,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = tmp_path / "sm_train-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sm-train\nVersion: 0.1.0\n")
    if recorded is not None:
        (metadata / "direct_url.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed_form._form.cache_clear()
    try:
        assert install_command("aws") == command
    finally:
        installed_form._form.cache_clear()
