"""Tests of the review page in headless Chromium, opened from a file.

They need Debian's packages chromium and chromium-driver and are skipped without them, unless
REQUIRE_BROWSER is set, as by ``.ci/run``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from sm_train.toolkit.analysis.review.review_model import Review
from sm_train.toolkit.analysis.review.review_page import write_page

from tests.support.sample_reviews import healthy, offline, stalled
from tests.toolkit.analysis.review.page_in_browser_support import emulate

pytestmark = pytest.mark.integration

REVIEW = Review((healthy(16), stalled(), offline()), ("one warning",))

# All elements that Tab reaches, in the page's order.
STOPS = """
return [...document.querySelectorAll('a[href], summary, [tabindex="0"]')]
    .filter((one) => one.checkVisibility())
"""
# The color of every visible text and of the nearest background behind it.
TEXTS = """
const found = new Map(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    let ground = element;
    while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)")
        ground = ground.parentElement;
    const isSvg = element instanceof SVGElement;
    const colors = [isSvg ? style.fill : style.color,
        getComputedStyle(ground || document.body).backgroundColor];
    found.set(colors.join(" on "), [...colors, text.slice(0, 40)]);
}
return [...found.values()];
"""
LINE_SIZES = """
return Object.fromEntries([...document.querySelectorAll("svg.plot")].map((svg) => [
    svg.closest("figure").querySelector("h4").id,
    [...svg.querySelectorAll('[id*="-line-"]')].map((line) => {
        const box = line.getBBox();
        return box.width + box.height;
    }),
]));
"""
TOO_WIDE = """
return [...document.querySelectorAll("body *")].filter((one) =>
    one.getBoundingClientRect().right > innerWidth + 1 && one.checkVisibility()
    && !one.closest(".scroll, .away, svg")).map((one) => one.outerHTML.slice(0, 99));
"""

WIDE_COMPARISONS = """
return [...document.querySelectorAll(".compare")].filter((table) =>
    table.scrollWidth > table.parentElement.clientWidth
    || [...table.querySelectorAll("th[scope=row]")].some((one) => one.clientHeight > 60))
    .map((table) => table.outerHTML.slice(0, 99));
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, REVIEW)
    return path.as_uri()


@pytest.fixture
def opened(browser: webdriver.Chrome, address: str) -> webdriver.Chrome:
    """Load the page on a desktop screen in the light theme."""
    emulate(browser, width=1200, theme="light")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(address)
    return browser


def press(browser: webdriver.Chrome, key: str) -> None:
    ActionChains(browser).send_keys(key).perform()


def requests(browser: webdriver.Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


def test_page_opens_without_console_messages_or_requests(
    opened: webdriver.Chrome, address: str
) -> None:
    assert opened.title == "Review of 3 jobs"
    assert opened.get_log("browser") == []
    assert [request for request in requests(opened) if not request.startswith("data:")] == [address]
    loaded = opened.execute_script("return performance.getEntriesByType('resource')")
    assert [
        resource["name"] for resource in loaded if not resource["name"].startswith("data:")
    ] == []


def test_every_line_of_every_chart_is_drawn(opened: webdriver.Chrome) -> None:
    line_sizes = opened.execute_script(LINE_SIZES)
    for job, reviewed in enumerate(REVIEW.document()["jobs"]):
        for index, chart in enumerate(reviewed["charts"]):
            lines = [
                drawn for drawn in chart["lines"] if any(v is not None for v in drawn["values"])
            ]
            sizes = line_sizes.pop(f"job-{job + 1}-chart-{index + 1}", [])
            assert len(sizes) == len(lines)
            assert min(sizes, default=1) > 0
    # The overlaid charts: those that represent a whole job, of two or three jobs.
    assert [len(sizes) for sizes in line_sizes.values()] == [3, 2, 2]


def test_tab_reaches_all_controls_in_order_and_keys_open_details(opened: webdriver.Chrome) -> None:
    stops = opened.execute_script(STOPS)
    assert len(stops) > 30
    for stop in stops:
        press(opened, Keys.TAB)
        active = opened.switch_to.active_element
        assert active == stop
        style = opened.execute_script(
            "const s = getComputedStyle(arguments[0]), b = arguments[0].getBoundingClientRect();"
            "return [s.outlineStyle, parseFloat(s.outlineWidth), b.left >= 0"
            " && b.bottom > 0 && b.top < innerHeight]",
            active,
        )
        assert style == ["solid", 3, True], active.text[:99]
    details = next(stop for stop in stops if stop.tag_name == "summary")
    is_open = "return arguments[0].parentElement.open"
    opened.execute_script("arguments[0].focus()", details)
    for key, state in ((Keys.ENTER, True), (Keys.SPACE, False)):
        press(opened, key)
        assert opened.execute_script(is_open, details) is state


def test_first_tab_skips_to_the_verdicts(opened: webdriver.Chrome) -> None:
    press(opened, Keys.TAB)
    skip = opened.switch_to.active_element
    assert skip.text == "Skip to the verdicts"
    press(opened, Keys.ENTER)
    assert opened.switch_to.active_element.get_attribute("id") == "verdicts"
    press(opened, Keys.TAB)
    assert opened.switch_to.active_element.get_attribute("role") == "region"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_phone_shows_the_page_without_horizontal_scrolling(
    opened: webdriver.Chrome, theme: str
) -> None:
    emulate(opened, width=360, theme=theme)
    opened.execute_script("document.querySelectorAll('details').forEach((one) => one.open = true)")
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 360
    assert opened.execute_script(TOO_WIDE) == []
    # The comparison fits, too: each row becomes a block with one line per job.
    assert opened.execute_script(WIDE_COMPARISONS) == []
    smallest = opened.execute_script(
        "return Math.min(...[...document.querySelectorAll('svg text')].map((one) =>"
        " parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a))"
    )
    assert smallest >= 9
    # Wider content scrolls by keyboard in its own region.
    wide = opened.execute_script(
        "const one = [...document.querySelectorAll('.scroll')].find((one) =>"
        " one.scrollWidth > one.clientWidth); one.focus(); return one"
    )
    press(opened, Keys.ARROW_RIGHT)
    opened.execute_async_script(
        "const done = arguments[1], one = arguments[0];"
        "const poll = () => one.scrollLeft > 0 ? done() : requestAnimationFrame(poll); poll()",
        wide,
    )


def test_print_shows_the_evidence(opened: webdriver.Chrome) -> None:
    evidence = opened.find_element("css selector", ".verdicts details li")
    assert not evidence.is_displayed()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert opened.execute_script("return arguments[0].getClientRects().length", evidence) == 1
        assert evidence.size["height"] > 0
    finally:
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_themes_differ_and_text_has_enough_contrast(opened: webdriver.Chrome) -> None:
    opened.execute_script("document.querySelectorAll('details').forEach((one) => one.open = true)")
    pages = []
    for theme in ("light", "dark"):
        emulate(opened, width=1200, theme=theme)
        found = opened.execute_script(TEXTS)
        for front, ground, text in found:
            assert contrast(front, ground) >= 4.5, (theme, text, front, ground)
        line = "return getComputedStyle(document.querySelector('[id*=\"-line-1\"] path')).stroke"
        pages.append(({ground for _, ground, _ in found}, opened.execute_script(line)))
    assert not pages[0][0] & pages[1][0]
    assert pages[0][1] != pages[1][1]


def contrast(*colors: str) -> float:
    """Return the WCAG 2.2 contrast of two colors in CSS notation."""
    levels = []
    for color in colors:
        assert color.startswith("rgb("), color
        parts = [int(part) / 255 for part in color[4:-1].split(",")]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        levels.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(levels) + 0.05) / (min(levels) + 0.05)


def test_outline_is_accessible_to_screen_readers(opened: webdriver.Chrome) -> None:
    def evaluate(script: str) -> Any:
        return opened.execute_script(f"return {script}")

    levels = evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map((one) => +one.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    for before, after in pairwise(levels):
        assert after <= before + 1
    assert evaluate("document.documentElement.lang") == "en"
    for landmark in ("header", "main", "nav"):
        assert evaluate(f"document.querySelectorAll('{landmark}').length") == 1
    unnamed = {
        "table": "one.caption && one.caption.textContent",
        "th": "one.scope && (one.textContent.trim() || one.children.length)",
        "svg.plot": "one.getAttribute('aria-label').length > 20",
        "section, .scroll, nav": "one.ariaLabel || one.ariaLabelledByElements.length",
        "a, summary": "one.textContent.trim()",
        "svg:not(.plot)": "one.getAttribute('aria-hidden')",
    }
    for selector, name in unnamed.items():
        without = f"[...document.querySelectorAll('{selector}')].filter((one) => !({name}))"
        assert evaluate(f"{without}.map((one) => one.outerHTML.slice(0, 99))") == []


def test_log_text_creates_no_elements_and_runs_no_script(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    attack = "</script></style><script>window.caught = 1</script><img src=x onerror='caught = 1'>"
    job = replace(
        offline(),
        name=attack,
        verdicts=(replace(offline().verdicts[0], sentence=attack, evidence=(attack,)),),
    )
    write_page(tmp_path / "page.html", Review((job,), (attack,)))
    browser.get_log("browser")
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.get_log("browser") == []
    assert browser.execute_script(
        "return [typeof caught, document.querySelectorAll('img, script').length]"
    ) == ["undefined", 0]
    assert attack in browser.find_element("tag name", "h1").text
