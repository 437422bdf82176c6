"""The page at ``/`` in a headless browser: typing, streaming, reports of tokens, settings, comparison."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser, server) -> Iterator[Any]:
    """Return a function that opens the page; errors of its script fail the test."""
    pages = []

    def open_(url: str = server.url, **options: Any) -> Any:
        page = browser.new_page(**options)
        pages.append((page, errors := []))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url)
        page.locator("#model:has-text('model'), #key:visible").first.wait_for()
        return page

    yield open_
    for page, errors in pages:
        page.close()
        assert [error for error in errors if "status of 4" not in error] == []


def generate(page: Any, prompt: str = "Hello", count: int = 8) -> None:
    page.fill("#prompt", prompt)
    page.locator("#count").evaluate(
        "(e, n) => { e.value = n; e.dispatchEvent(new Event('input', {bubbles: true})) }", count
    )
    page.click("#go")
    page.locator("#go:enabled").wait_for()


def test_tokens_stream_in_and_have_the_iterations_of_the_api(open_page, server):
    page = open_page()
    assert not page.is_visible("#key")
    generate(page)
    limits = {"max_iterations": int(page.input_value("#iterations")), "tolerance": 1e-4}
    reply = server.complete("Hello", max_tokens=8, return_iterations=True, **limits)
    reports = reply.json["choices"][0]["token_reports"]
    labels = [token.get_attribute("aria-label") for token in page.locator(".token").all()]
    assert [int(label.split()[-2]) for label in labels] == [report["iterations"] for report in reports]
    colors = {
        token.evaluate("e => getComputedStyle(e).backgroundColor") for token in page.locator(".token").all()
    }
    assert len(colors) == len({report["iterations"] for report in reports}) > 1
    assert "8 tokens" in page.text_content("#status")


def test_hovering_and_arrow_keys_show_the_report_of_a_token(open_page):
    page = open_page()
    generate(page)
    page.locator(".token").nth(2).hover()
    report = page.text_content(".report")
    assert "iterations, residual" in report
    assert report.count("%") == 5
    page.focus(".tokens")
    page.keyboard.press("End")
    assert page.locator(".token").nth(7).get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowLeft")
    assert page.locator(".token").nth(6).get_attribute("aria-selected") == "true"
    assert page.text_content(".report") != report


def test_the_sliders_change_the_search(open_page):
    page = open_page()
    page.locator("#iterations").fill("2")
    generate(page)
    labels = [token.get_attribute("aria-label") for token in page.locator(".token").all()]
    assert all(label.endswith(" 2 iterations") for label in labels)
    assert "8 did not converge" in page.text_content("#status")
    assert page.locator(".token.open").count() == 8


def test_two_tolerances_are_compared_side_by_side(open_page):
    page = open_page()
    page.check("#compare")
    page.locator("#other").fill("0")
    generate(page)
    assert page.locator(".answer").count() == 2
    assert page.locator(".answer h2").all_text_contents() == ["Tolerance 0.0001", "Tolerance 1"]
    assert page.locator(".answer").nth(1).locator("tbody tr").count() == 8


def test_the_first_token_is_shown_soon(open_page, server):
    page = open_page()
    generate(page, count=1)
    seconds = []
    for _ in range(3):
        seconds.append(
            page.evaluate(
                """async () => {
                    const began = performance.now();
                    document.getElementById("answers").replaceChildren();
                    document.getElementById("go").click();
                    while (!document.querySelector(".token")) await new Promise(requestAnimationFrame);
                    return (performance.now() - began) / 1000;
                }"""
            )
        )
        page.locator("#go:enabled").wait_for()
    assert min(seconds) < 0.3


def test_stop_ends_the_text_on_the_server(open_page, server):
    page = open_page()
    page.locator("#count").fill("80")
    page.fill("#prompt", "Hello")
    page.click("#go")
    page.wait_for_selector(".token")
    page.click("#stop")
    page.locator("#go:enabled").wait_for()
    assert page.text_content("#status") == "Stopped."
    assert server.idle()


def test_a_problem_is_shown_with_the_server_s_message(open_page):
    page = open_page()
    generate(page, "x" * 95, count=8)
    assert "max_tokens" in page.text_content("#problem")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(open_page, scheme):
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.check("#compare")
    generate(page, count=24)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("[...document.querySelectorAll('button')].every(b => b.offsetHeight >= 44)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast_and_every_field_a_label(open_page, scheme):
    page = open_page(color_scheme=scheme)
    page.locator("#iterations").fill("9")
    generate(page, count=12)
    page.locator(".token").first.hover()
    lowest = page.evaluate(CONTRAST)
    assert lowest[0] >= 4.5, lowest
    fields = "[...document.querySelectorAll('input,textarea')]"
    assert page.evaluate(f"{fields}.every(field => field.labels.length)")
    assert page.get_attribute("html", "lang") == "en"


def test_a_key_is_asked_for_where_the_server_requires_one(open_page, model, start):
    page = open_page(start(model, api_key="secret").url)
    assert page.is_visible("#key")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.locator("#model:has-text('tiny')").wait_for()
    generate(page, count=3)
    assert page.locator(".token").count() == 3


CONTRAST = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const luminance = (color, under) => {
        canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => {
            v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    let lowest = [99, ""];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility() || element.disabled || element.tagName === "SCRIPT") continue;
        let around = element, ground = "rgba(0, 0, 0, 0)";
        while (around && ground === "rgba(0, 0, 0, 0)") {
            ground = getComputedStyle(around).backgroundColor;
            around = around.parentElement;
        }
        const [a, b] = [luminance(getComputedStyle(element).color, ground), luminance(ground, ground)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < lowest[0]) lowest = [ratio, element.outerHTML.slice(0, 80)];
    }
    return lowest;
}"""
