"""The time from the click to the first token on the page of a running server, in headless Chromium.

    python benchmarks/page.py [ADDRESS] [--trials 30] [--chromium /usr/bin/chromium]
    python benchmarks/page.py [ADDRESS] --picture docs/pictures/page.png

A trial ends when the first token is in the document and a frame begins. ``--picture`` takes a picture of a
word problem's page instead, all tokens solved together. Needs playwright.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FIRST_TOKEN = """async () => {
    document.getElementById("answers").replaceChildren();
    const began = performance.now();
    document.getElementById("go").click();
    while (!document.querySelector(".token")) await new Promise(requestAnimationFrame);
    const first = performance.now() - began;
    while (document.getElementById("go").disabled) await new Promise(requestAnimationFrame);
    return [first, performance.now() - began, document.querySelectorAll(".token").length];
}"""


SEQUENCE = "3 0 1 5 2 0 4 4 1 0 3 2 5 1 0 4"
CHOSEN = 11
"""The sequence of the picture, and the place of the token whose search it shows."""


def take_picture(page: Page, path: str) -> None:
    """Run a word problem, choose a token, and save what a window shows."""
    page.set_viewport_size({"width": 1240, "height": 1060})
    page.select_option("#order", "all")
    page.fill("#prompt", SEQUENCE)
    page.click("#go")
    page.locator("#go:enabled").wait_for()
    page.locator(".token").nth(CHOSEN).hover()
    page.screenshot(path=path)
    Image.open(path).quantize(128).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--trials", type=int, default=30, metavar="N")
    parser.add_argument("--prompt", help="text or token IDs (default: what the page proposes)")
    parser.add_argument("--picture", metavar="PATH", help="PNG file to write")
    parser.add_argument("--chromium", default=shutil.which("chromium"), metavar="PATH")
    options = parser.parse_args(arguments)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(options.address)
        page.locator("#model:has-text('model')").wait_for()
        if options.picture is not None:
            take_picture(page, options.picture)
            browser.close()
            return 0
        if options.prompt is not None:
            page.fill("#prompt", options.prompt)
        page.evaluate(FIRST_TOKEN)  # warm-up
        found = [page.evaluate(FIRST_TOKEN) for _ in range(options.trials)]
        browser.close()
    for name, values in (("first token", [row[0] for row in found]), ("all", [row[1] for row in found])):
        values = sorted(values)
        p95 = values[min(len(values) - 1, int(0.95 * len(values)))]
        print(
            f"{name}, ms: lowest {values[0]:.0f}, median {statistics.median(values):.0f}, 95 % {p95:.0f}, "
            f"highest {values[-1]:.0f}; {len(values)} trials of {found[0][2]} tokens"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
