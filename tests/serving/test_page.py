"""The page at ``/`` in a headless browser: typing, streaming, reports of tokens, settings, comparison."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import sync_playwright

from implicit_blocks.decoding.slots.continuous import ContinuousDecoder
from implicit_blocks.serving.language import Numbers
from trainer.specs.groups import notation

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def products(serve, make_model) -> Iterator[Any]:
    """Return a server of an implicit model of products in S3, not trained, beside its explicit twin."""
    twin = make_model(vocab_size=6, explicit=True)
    task = {"problem": notation("S3"), "name": "implicit", "compare": {"explicit": twin}}
    with serve(make_model(vocab_size=6), Numbers(), **task) as found:
        yield found


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


def slide(page: Any, name: str, value: float) -> None:
    page.locator(f"#{name}").evaluate(
        "(e, n) => { e.value = n; e.dispatchEvent(new Event('input', {bubbles: true})) }", value
    )


def run(page: Any, prompt: str = "Hello", count: int = 8) -> None:
    page.fill("#prompt", prompt)
    slide(page, "count", count)
    page.click("#go")
    page.locator("#go:enabled").wait_for()


def labels(page: Any, answer: int = 0) -> list[str]:
    return [
        token.get_attribute("aria-label")
        for token in page.locator(".answer").nth(answer).locator(".token").all()
    ]


def iterations(page: Any) -> list[int]:
    return [int(label.split()[-2]) for label in labels(page)]


def test_tokens_stream_in_and_have_the_iterations_of_the_api(open_page, server):
    page = open_page()
    assert not page.is_visible("#key")
    run(page)
    limits = {"max_iterations": int(page.input_value("#iterations")), "tolerance": 1e-4}
    reply = server.complete("Hello", max_tokens=8, return_iterations=True, **limits)
    reports = reply.json["choices"][0]["token_reports"]
    assert iterations(page) == [report["iterations"] for report in reports]
    colors = {
        token.evaluate("e => getComputedStyle(e).backgroundColor") for token in page.locator(".token").all()
    }
    assert len(colors) == len({report["iterations"] for report in reports}) > 1
    assert "8 tokens" in page.text_content("#status")


@pytest.fixture
def slow_tokens(monkeypatch):
    """Let the decoder take 10 ms more per iteration, so that the page is observed while a text is made."""
    step = ContinuousDecoder.step

    def slow(decoder):
        time.sleep(0.01)
        return step(decoder)

    monkeypatch.setattr(ContinuousDecoder, "step", slow)


def test_tokens_appear_one_after_the_other(open_page, slow_tokens):
    page = open_page()
    page.fill("#prompt", "Hello")
    slide(page, "count", 24)
    counts = page.evaluate(
        """async () => {
            const seen = new Set();
            document.getElementById("go").click();
            do {
                seen.add(document.querySelectorAll(".token").length);
                await new Promise(requestAnimationFrame);
            } while (document.getElementById("go").disabled);
            return [...seen];
        }"""
    )
    assert len(counts) > 3
    assert counts == sorted(counts)


def test_hovering_shows_the_curve_the_iterates_and_the_alternatives_of_the_api(open_page, server):
    page = open_page()
    run(page)
    made = server.complete("Hello", max_tokens=8, return_iterations=True).json["choices"][0]["token_reports"]
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "continuation": [report["token_id"] for report in made],
        "tolerance": 1e-4,
        "max_iterations": int(page.input_value("#iterations")),
    }
    expected = server.post("/v1/inspect", body).json["tokens"][7]
    page.locator(".token").nth(2).hover()
    page.locator(".report .segment").first.wait_for()
    assert f"{expected['iterations']} iterations · residual" in page.text_content(".facts")
    points = page.locator("figure").nth(0).locator("polyline").get_attribute("points").split()
    assert len(points) == len(expected["curve"])
    assert page.locator(".alternatives li").count() >= 3
    shares = page.locator(".alternatives .share").all_text_contents()
    first = 100 * 2.718281828 ** expected["alternatives"][0]["log_probability"]
    assert float(shares[0].removesuffix(" %")) == pytest.approx(first, abs=0.06)
    page.click("text=Every iterate")
    rows = page.locator(".report tbody tr")
    assert rows.count() == len(expected["lens"])
    residuals = [float(text) for text in rows.locator("td:nth-child(2)").all_text_contents()]
    assert residuals == pytest.approx(
        [expected["curve"][one["iterations"] - 1] for one in expected["lens"]], rel=0.06
    )


def test_arrow_keys_move_between_tokens_and_focus_chooses_the_first(open_page):
    page = open_page()
    run(page)
    page.focus(".tokens")
    assert page.locator(".token").nth(0).get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert page.locator(".token").nth(7).get_attribute("aria-selected") == "true"
    report = page.text_content(".report")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".token").nth(6).get_attribute("aria-selected") == "true"
    assert page.get_attribute(".tokens", "aria-activedescendant") == "a0-6"
    assert page.text_content(".report") != report
    page.locator(".report .segment").first.wait_for()


def test_the_sliders_change_the_search(open_page):
    page = open_page()
    page.locator("#iterations").fill("2")
    run(page)
    assert iterations(page) == [2] * 8
    assert "8 did not converge" in page.text_content(".summary")
    assert page.locator(".token.open").count() == 8


def test_two_tolerances_are_compared_side_by_side(open_page):
    page = open_page(viewport={"width": 1280, "height": 900})
    page.select_option("#compare", "tolerance")
    slide(page, "other", 0)
    run(page)
    assert page.locator(".answer h2").all_text_contents() == ["Tolerance 0.0001", "Tolerance 1"]
    first, second = (page.locator(".answer").nth(n).bounding_box() for n in (0, 1))
    assert first["x"] + first["width"] <= second["x"]
    page.locator(".token").nth(3).hover()
    for number in (0, 1):
        chosen = page.locator(".answer").nth(number).locator(".token.chosen")
        assert chosen.get_attribute("id") == f"a{number}-3"
    page.locator(".answer").nth(1).locator(".segment").first.wait_for()
    assert page.locator(".answer").nth(1).locator("tbody tr").count() >= 8


def test_a_word_problem_is_run_beside_the_explicit_twin(open_page, products):
    page = open_page(products.url)
    tokens = [1, 2, 0, 5, 3]
    page.fill("#prompt", " ".join(map(str, tokens)))
    page.click("#go")
    page.locator("#go:enabled").wait_for()
    expected = notation("S3").products(tokens)
    for number, name in enumerate(("implicit", "explicit")):
        limits = {"tolerance": 1e-4} if name == "implicit" else {}
        body = {"model": name, "prompt": tokens[:1], "continuation": tokens[1:], **limits}
        reports = products.post("/v1/inspect", body).json["tokens"]
        assert [report["product"]["token_id"] for report in reports] == expected
        marks = ["right" if report["right"] else "wrong" for report in reports]
        assert [label.split(", ")[1] for label in labels(page, number)] == marks
        rows = page.locator(".answer").nth(number).locator("details[open] tbody tr")
        assert rows.count() == 5
        assert rows.nth(4).locator("svg.picture").count() == 3
        assert notation("S3").names[expected[4]] in rows.nth(4).locator("td").nth(1).text_content()


def test_the_palette_appends_a_token_and_runs_the_sequence(open_page, products):
    page = open_page(products.url)
    page.fill("#prompt", "")
    page.get_by_role("button", name="append (1 3)").click()
    page.locator(".token").first.wait_for()
    page.get_by_role("button", name="append e").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(".answer").first.locator(".token").nth(1).wait_for()
    assert page.input_value("#prompt") == "5 1"
    page.click("#remove")
    assert page.input_value("#prompt") == "5"
    slide(page, "count", 7)
    page.click("#random")
    page.locator("#go:enabled").wait_for()
    assert len(page.input_value("#prompt").split()) == len(labels(page)) == 7
    page.fill("#prompt", "1 x")
    page.click("#go")
    page.locator("#problem:has-text('token IDs')").wait_for()


def test_the_first_token_is_shown_soon(open_page, products):
    page = open_page(products.url)
    run(page, "0 1 2", count=1)
    seconds = []
    for _ in range(3):
        seconds.append(page.evaluate(FIRST_TOKEN) / 1000)
        page.locator("#go:enabled").wait_for()
    assert min(seconds) < 1.5  # on a busy machine; benchmarks/page.py measures


FIRST_TOKEN = """async () => {
    document.getElementById("answers").replaceChildren();
    const began = performance.now();
    document.getElementById("go").click();
    while (!document.querySelector(".token")) await new Promise(requestAnimationFrame);
    return performance.now() - began;
}"""


def test_stop_ends_the_text_on_the_server(open_page, server, slow_tokens):
    page = open_page()
    slide(page, "count", 80)
    page.fill("#prompt", "Hello")
    page.click("#go")
    page.wait_for_selector(".token")
    page.click("#stop")
    page.locator("#go:enabled").wait_for()
    assert page.text_content("#status") == "Stopped."
    assert server.idle()


def test_a_problem_is_shown_with_the_server_s_message(open_page):
    page = open_page()
    run(page, "x" * 95, count=8)
    assert "max_tokens" in page.text_content("#problem")


def test_texts_of_the_model_are_never_read_as_html(open_page, server, monkeypatch):
    monkeypatch.setattr(server.language, "token", lambda token: f"<img src=x onerror=alert({token})>")
    page = open_page()
    run(page, count=4)
    page.locator(".token").nth(1).hover()
    page.locator(".report .segment").first.wait_for()
    assert page.locator("#answers img").count() == 0
    assert page.locator(".token").first.text_content().startswith("<img src=x")


def check_contrast(page: Any) -> None:
    """Check the contrast of all visible texts with what is behind them, in both themes."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        lowest = page.evaluate(CONTRAST)
        assert lowest[0] >= 4.5, (scheme, lowest)


def test_a_phone_shows_everything_without_scrolling_sideways(open_page, products, server):
    for url, prompt in ((server.url, "Hello"), (products.url, "0 3 2 5 1 1")):
        page = open_page(url, viewport=PHONE, has_touch=True)
        page.click("#settings > summary")
        page.select_option("#compare", "tolerance")
        run(page, prompt, count=10)
        page.locator(".token").nth(4).tap()
        page.locator(".report .segment").first.wait_for()
        assert page.locator(".token.chosen").first.get_attribute("id") == "a0-4"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click("text=Every iterate >> nth=0")
        assert page.evaluate(
            "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
        )
        assert page.evaluate(TOUCHED)
        check_contrast(page)


def test_an_open_table_of_iterates_stays_open_when_the_report_changes(open_page):
    page = open_page()
    run(page)
    page.focus(".tokens")
    page.locator(".report .segment").first.wait_for()
    page.click("text=Every iterate")
    first = page.text_content(".report h3")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("before => document.querySelector('.report h3').textContent !== before", arg=first)
    page.locator(".report .segment").first.wait_for()
    assert page.locator(".report .scroll").first.is_visible()


@pytest.mark.parametrize("task", [False, True], ids=["text", "products"])
def test_texts_have_contrast_and_controls_have_names_focus_and_order(open_page, server, products, task):
    page = open_page(products.url if task else server.url)
    page.locator("#iterations").fill("9")
    run(page, "0 3 2 5 1" if task else "Hello", count=8)
    page.focus(".tokens")
    page.locator(".report .segment").first.wait_for()
    page.click("text=Every iterate")
    page.locator(".report .scroll").first.wait_for()
    page.get_by_text("Table of tokens").first.wait_for()
    check_contrast(page)
    assert page.evaluate(UNNAMED) == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))")
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.get_attribute("html", "lang") == "en"
    page.focus(".skip")
    seen: dict[str, float] = {}
    for _ in range(30):
        page.keyboard.press("Tab")
        name, width = page.evaluate(FOCUS)
        if name in seen or not name:
            break
        seen[name] = width
    assert len(seen) >= (15 if task else 11)
    assert [name for name, width in seen.items() if width < 2] == []


def test_a_key_is_asked_for_where_the_server_requires_one(open_page, model, start):
    page = open_page(start(model, api_key="secret").url)
    assert page.is_visible("#key")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.locator("#model:has-text('tiny')").wait_for()
    run(page, count=3)
    assert page.locator(".token").count() == 3


def test_the_page_runs_its_own_script_only(server):
    reply = server.request("GET", "/")
    policy = reply.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


UNNAMED = """() => [...document.querySelectorAll(
        "a,button,input,select,textarea,summary,[tabindex='0'],[role=img]")]
    .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim()))
    .map((e) => e.outerHTML)"""

TOUCHED = """() => [...document.querySelectorAll("button")]
    .every((e) => !e.checkVisibility() || e.offsetHeight >= 44)"""

FOCUS = """() => {
    const e = document.activeElement;
    if (!e || e === document.body) return ["", 0];
    const style = getComputedStyle(e);
    const width = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
    return [e.id || e.outerHTML.slice(0, 60), width];
}"""

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
        const shape = element.previousElementSibling;
        if (element.matches(".inside, .ball text")) ground = getComputedStyle(shape).fill;
        while (around && ground === "rgba(0, 0, 0, 0)") {
            ground = getComputedStyle(around).backgroundColor;
            around = around.parentElement;
        }
        const style = getComputedStyle(element);
        const own_color = element.tagName === "text" ? style.fill : style.color;
        const [a, b] = [luminance(own_color, ground), luminance(ground, ground)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < lowest[0]) lowest = [ratio, element.outerHTML.slice(0, 120), ground];
    }
    return lowest;
}"""
