"""Screenshots of the Space for README and docs: `make screenshots`."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCREENS = {"space": (1200, 1500), "space-phone": (390, 1800)}


@contextlib.contextmanager
def running_space(**environment: str) -> Iterator[tuple[str, int]]:
    """The Space on a free port of this machine; gives its address and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "app.py"],
        cwd=ROOT / "spaces",
        env={**os.environ, **settings, **environment},
    )
    try:
        url, patience = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while True:
            if process.poll() is not None or time.monotonic() > patience:
                raise RuntimeError("The Space did not start.")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=2).close()
                break
            time.sleep(0.5)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def browser():
    """Debian's chromium, without a window."""
    from playwright.sync_api import sync_playwright

    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        raise FileNotFoundError("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def use(page, url: str, prompt: str | None = None) -> str:
    """Open the Space in `page`, type a prompt (or take the one that is there), run it, and give its
    verdict.
    """
    page.goto(url)
    run = page.get_by_role("button", name="Run", exact=True)
    run.wait_for()
    if prompt is not None:
        page.get_by_label("Prompt").fill(prompt)
    run.click()
    page.locator("#verdict", has_text="The outputs").wait_for(timeout=120_000)
    page.locator("img[alt], .plot-container img, canvas").first.wait_for(timeout=30_000)
    page.wait_for_timeout(1500)
    return page.locator("#verdict").inner_text()


if __name__ == "__main__":
    with running_space() as (url, _), browser() as chromium:
        for name, (width, height) in SCREENS.items():
            page = chromium.new_page(viewport={"width": width, "height": height})
            print(name, use(page, url))
            page.screenshot(path=ROOT / "docs" / f"{name}.png", full_page=True)
