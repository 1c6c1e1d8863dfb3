"""A real headless Chromium for tests of the web page. Debian's `chromium`; playwright drives it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "needs chromium: apt-get install chromium"
WAIT_MS_MAX = 300_000


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(browser: Any, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A page at a URL; at the end it fails for each error of the page: scripts, and what the content policy stopped."""
    errors: list[str] = []
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS_MAX)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("dialog", lambda dialog: (errors.append("a dialog opened"), dialog.dismiss()))
    try:
        page.goto(url)
        yield page
        assert not errors, errors
    finally:
        context.close()


def soon(page: Any, selector: str) -> Any:
    """What the elements become, in time. (`wait_for_function` needs `eval`, which the page's policy forbids.)"""
    from playwright.sync_api import expect

    expect.set_options(timeout=WAIT_MS_MAX)
    return expect(page.locator(selector))


def violations_in(page: Any) -> list[tuple[str, str]]:
    """What axe-core finds against the rules of WCAG 2.1 A and AA that a program can judge, contrast among them."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).response
    assert len(found["passes"]) > 10, "axe looked at nothing"
    return [(it["id"], it["nodes"][0]["html"][:120]) for it in found["violations"]]
