"""The page for blind comparison runs its own script and no other, whatever the prompts contain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from sm_train.toolkit.models.sampling.comparison_page import comparison_page

if TYPE_CHECKING:
    from selenium import webdriver

PROMPTS = [
    "<!--<script>",
    "</script><script>document.title = 'attacked'</script>",
    "{{document}} {{script_hash}}",
    "<img src=x onerror=\"document.title = 'attacked'\">",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_hostile_prompt_is_text(browser: webdriver.Chrome, tmp_path: Path, prompt: str) -> None:
    image = Image.new("RGB", (8, 8))
    path = tmp_path / "page.html"
    path.write_text(comparison_page(("a", "b"), [prompt], ([image], [image]), 0))
    browser.get_log("browser")
    browser.get(path.as_uri())
    assert browser.find_element("id", "prompt").text == prompt
    assert browser.title == "1 pairs to judge"
    assert browser.get_log("browser") == []


def test_the_page_is_judged_to_the_end(browser: webdriver.Chrome, tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8))
    path = tmp_path / "page.html"
    path.write_text(comparison_page(("a", "b"), PROMPTS, ([image] * 4, [image] * 4), 0))
    browser.get(path.as_uri())
    for _ in PROMPTS:
        browser.find_element("css selector", "[data-choice=tie]").click()
    assert browser.find_element("id", "result").is_displayed()
    assert not browser.find_element("id", "judging").is_displayed()


@pytest.mark.integration
def test_an_injected_script_does_not_run(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = comparison_page(("a", "b"), ["x"], ([Image.new("RGB", (8, 8))],) * 2, 0)
    injected = page.replace("</body>", "<script>document.title = 'attacked'</script></body>")
    assert injected != page
    (tmp_path / "page.html").write_text(injected)
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.title == "1 pairs to judge"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]
