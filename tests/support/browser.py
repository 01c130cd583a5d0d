"""A real browser for tests of pages: the distribution's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium in PATH (Debian, Ubuntu: apt-get install chromium)"
)


@asynccontextmanager
async def browser_page(**options: object) -> AsyncIterator[Page]:
    """A fresh page; anything that a page logs as an error or asks of another host fails the test."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(**options)  # type: ignore[arg-type]
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(f"script: {error}"))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on(
            "request", lambda r: problems.append(f"left the host: {r.url}") if _elsewhere(r.url) else None
        )
        try:
            yield page
        finally:
            await browser.close()
        assert [text for text in problems if not text.startswith("Failed to load resource")] == []


def _elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:"))
