"""Chromium, or Chrome, without a window: for tests of the page and for its pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

DESK = 1280, 800
PHONE = 390, 844


def why_no_browser() -> str | None:
    """Return what is missing for :func:`browser`."""
    missing = [name for name, path in (("chromium", _binary()), ("chromedriver", _driver())) if path is None]
    return f"no {' and no '.join(missing)} here: apt-get install chromium chromium-driver" if missing else None


def _binary() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def _driver() -> str | None:
    return shutil.which("chromedriver")


@contextmanager
def browser() -> Iterator[Chrome]:
    """Open a browser of a desk's size, and close it."""
    options = ChromeOptions()
    options.binary_location = _binary() or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(_driver()))
    try:
        resize(driver, DESK)
        yield driver
    finally:
        driver.quit()


def resize(driver: Chrome, size: tuple[int, int]) -> None:
    """Give the page that many CSS pixels."""
    metrics: dict[str, Any] = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def darken(driver: Chrome, *, is_dark: bool) -> None:
    """Have the page believe that its reader likes it dark, or light."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
