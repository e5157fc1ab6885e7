"""The HTML pages in Chromium at desktop and phone width: nothing scrolls sideways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver
from sm_train.toolkit.analysis.review.review_model import Review
from sm_train.toolkit.analysis.review.review_page import write_page
from sm_train.toolkit.models.sampling.comparison_page import comparison_page
from sm_train.toolkit.planning.cost_result import price
from sm_train.toolkit.planning.estimate_inputs import CostOptions, resolve_inputs
from sm_train.toolkit.planning.html_report import write_report

from tests.support.run_documents import stage
from tests.support.run_files import write_run
from tests.support.sample_reviews import healthy, stalled
from tests.toolkit.analysis.review.page_in_browser_support import emulate

pytestmark = pytest.mark.integration

PHONE, DESKTOP = 360, 1280


def cost_page(path: Path) -> None:
    run = write_run(path.parent, name="a-run-with-a-long-name", stages=[stage("256px")])
    inputs = resolve_inputs(CostOptions(run=str(run)))
    write_report(path, "my-model", price(inputs).document, "us-east-1")


def review_page(path: Path) -> None:
    write_page(path, Review((healthy(4), stalled()), ("one warning",)))


def compare_page(path: Path) -> None:
    images = [Image.new("RGB", (512, 512), color) for color in ("red", "blue")]
    names = ("local-runs/my-model/512px/step-00001000", "local-runs/my-model/512px/step-00002000")
    prompts = ["a red bicycle against a brick wall " * 4, "supercalifragilistic" * 5]
    path.write_text(comparison_page(names, prompts, (images, images), 0))


@pytest.mark.parametrize("page", [cost_page, review_page, compare_page])
def test_page_fits_a_phone_and_a_desktop(
    browser: webdriver.Chrome, tmp_path: Path, page: Callable[[Path], None]
) -> None:
    path = tmp_path / "page.html"
    page(path)
    browser.get_log("browser")
    browser.get(path.as_uri())
    for width in (PHONE, DESKTOP):
        emulate(browser, width=width, theme="light")
        measured = browser.execute_script(
            "return [document.documentElement.scrollWidth, innerWidth, document.body.innerText]"
        )
        assert measured[0] <= measured[1] == width
        assert measured[2].strip()
    assert browser.get_log("browser") == []
