"""Helpers of the tests of page in browser, which other tests use as well."""

from __future__ import annotations

from selenium import webdriver


def emulate(browser: webdriver.Chrome, width: int, theme: str) -> None:
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    preferences = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in preferences.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
