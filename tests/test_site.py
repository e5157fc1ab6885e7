"""The documentation site builds strictly, is complete and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click import Context
from sm_train.entrypoints.job_interface.events import FIELDS
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.analysis.diagnose.signatures import signatures
from sm_train.toolkit.cli import COMMANDS, cli

from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; strict, so that a missing page, link or anchor fails."""
    out = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"- (?:Home: )?(\S+\.md)$", text, re.MULTILINE))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    parts_of_pages = {name for name in written if name.startswith("includes/")}
    assert written - parts_of_pages <= listed


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]+)", text)
        loaded += [
            found
            for tag in re.findall(r"<link[^>]+>", text)
            if "canonical" not in tag
            for found in re.findall(r"href=\"([^\"]+)", tag)
        ]
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], page


def test_references_cover_every_command_key_event_and_signature(site: Path) -> None:
    reference = site / "reference"
    commands = (reference / "cli.html").read_text()
    context = Context(cli)
    for name in COMMANDS:
        assert f'id="{name}"' in commands
        for option in cli.get_command(context, name).params:  # type: ignore[union-attr]
            if option.param_type_name == "option" and not getattr(option, "hidden", False):
                assert option.opts[-1] in commands, (name, option.opts)
    run_file = (reference / "run-file.html").read_text()
    schema = RunConfig.model_json_schema()
    sections = [
        schema,
        *(definition for definition in schema["$defs"].values() if "properties" in definition),
    ]
    for key in {key for section in sections for key in section["properties"]}:
        assert f"<code>{key}</code>" in run_file, key
    failures = (reference / "failures.html").read_text()
    for code in signatures():
        assert f'id="{code}"' in failures
    events = (reference / "events.html").read_text()
    assert [kind for kind in FIELDS if f"<code>{kind}</code>" not in events] == []
    checks = (site / "checks.html").read_text()
    codes = re.findall(r"^### (\S+)$", (ROOT / "docs/checks.md").read_text(), re.MULTILINE)
    assert [code for code in codes if f'id="{code}"' not in checks] == []


def test_python_reference_lists_every_public_name(site: Path) -> None:
    import sm_train

    text = (site / "reference" / "api.html").read_text()
    for name in sm_train.__all__:
        assert name.startswith("__") or f"sm_train.{name}" in text, name


def test_search_index_holds_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    assert found == pages


def test_settings_name_no_host() -> None:
    loader = type("Loader", (yaml.SafeLoader,), {})
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), loader)
    assert settings["theme"]["font"] is False
    assert "extra_javascript" not in settings
