"""Reports of a text: the iterations of the library, as data and as a page that loads nothing."""

from __future__ import annotations

import json
import re

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.serving.inspection import inspect


@pytest.fixture(scope="module")
def report(model):
    return inspect(model, list(b"Hello"), max_new_tokens=4, tokenizer="bytes")


def test_a_report_has_the_text_and_its_greedy_continuation(model, report):
    made = ib.generate(model, [list(b"Hello")], max_new_tokens=4).tokens[0].tolist()
    assert [token["token_id"] for token in report.tokens] == [*b"Hello", *made]
    assert [token["generated"] for token in report.tokens] == [False] * 5 + [True] * 4
    assert report.tokens[0]["iterations"] is None


def test_the_text_is_solved_in_one_window_and_its_continuation_as_generate_does(model, report):
    ids = [token["token_id"] for token in report.tokens]
    with torch.no_grad():
        solution = model(torch.tensor([ids[:5]])).solution
    made = ib.generate(model, [ids[:5]], max_new_tokens=4)
    found = [token["iterations"] for token in report.tokens[1:]]
    assert found[:5] == solution.token_iterations[0].tolist()
    assert found[4:] == made.iterations[0].tolist()
    residuals = [token["residual"] for token in report.tokens[5:]]
    assert residuals == pytest.approx(made.residual[0].tolist(), rel=1e-2)


def test_every_search_has_a_curve_iterates_and_alternatives(model, report):
    ids = [token["token_id"] for token in report.tokens]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, :, :257].log_softmax(-1)
    for row, token in zip(logits, report.tokens[1:], strict=True):
        assert len(token["curve"]) == token["iterations"]
        assert token["curve"][-1] <= 1e-4 < token["curve"][0]
        assert [one["iterations"] for one in token["lens"]][:4] == [1, 2, 3, 4]
        followed = [one["token_id"] for one in token["alternatives"]]
        values = [one["log_probability"] for one in token["alternatives"]]
        assert values == pytest.approx(row[followed].tolist(), abs=2e-3)
        assert len(token["lens"][0]["alternatives"]) == len(followed)


def test_two_models_or_two_tolerances_are_compared(model, make_model):
    twin = make_model(explicit=True)
    options = {"tokenizer": "bytes", "max_new_tokens": 2}
    first, second = inspect(model, "Hi", compare=twin, **options).answers
    assert first.tokens == inspect(model, "Hi", **options).tokens
    assert second.tokens == inspect(twin, "Hi", **options).tokens
    loose = inspect(model, "Hi", compare_tolerance=0.5, **options)
    assert [answer.tolerance for answer in loose.answers] == [pytest.approx(1e-4), 0.5]
    assert loose.answers[1].tokens == inspect(model, "Hi", tolerance=0.5, **options).tokens
    with pytest.raises(ValueError, match="explicit model, which does not search"):
        inspect(model, "Hi", compare=twin, compare_tolerance=0.5, **options)


def test_limits_of_the_search_apply(model):
    report = inspect(model, [1, 2, 3], max_iterations=2, tokenizer="bytes")
    assert [token["iterations"] for token in report.tokens] == [None, 2, 2]
    assert not report.tokens[2]["converged"]


def test_an_explicit_model_has_predictions_and_no_searches(make_model):
    report = inspect(make_model(explicit=True), [1, 2, 3], max_new_tokens=1)
    assert [token["iterations"] for token in report.tokens] == [None] * 4
    assert len(report.tokens[3]["alternatives"]) >= 5


def test_the_page_of_a_report_loads_nothing_and_keeps_its_text_as_data(model, tmp_path):
    text = "</script><script>alert(1)</script> é"
    report = inspect(model, text, tokenizer="bytes")
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == 2
    data = re.search(r'id="report-data">(.*?)</script>', page)
    assert data is not None
    (answer,) = json.loads(data[1])["answers"]
    assert bytes(token["token_id"] for token in answer["tokens"]).decode() == text
    for mark in ("http://", "https://", "src=", "@import", "url("):
        assert mark not in page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert "srcdoc=" in report._repr_html_()


def test_the_command_writes_a_report_of_an_exported_model(make_model, tmp_path, capsys):
    pytest.importorskip("transformers")
    from implicit_blocks.hf import from_library

    from_library(make_model(vocab_size=19)).save_pretrained(tmp_path / "exported")
    output = tmp_path / "report.html"
    arguments = ["inspect", str(tmp_path / "exported"), "0 3 2", "--output", str(output)]
    assert main([*arguments, "--max-new-tokens", "2", "--compare-tolerance", "0.1", "--device", "cpu"]) == 0
    assert str(output) in capsys.readouterr().out
    assert '"token_id":3' in output.read_text(encoding="utf-8")
    for bad, message in (
        (["--max-new-tokens", "-1"], "max-new-tokens"),
        (["--tolerance", "-1"], "tolerance"),
        (["--compare-tolerance", "-1"], "tolerance"),
        (["--compare", str(tmp_path / "nowhere")], "nowhere"),
        (["--output", str(tmp_path / "no" / "folder.html")], "No such file"),
    ):
        assert main([*arguments, *bad]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [("", "empty"), ([300], "0 to 256"), ("x" * 5000, "4096")])
def test_a_text_without_a_report_is_named(model, text, message):
    with pytest.raises(ValueError, match=message):
        inspect(model, text, tokenizer="bytes")


def test_a_report_shows_its_tokens_in_a_browser(model, tmp_path):
    import shutil

    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    report = inspect(model, "Hello", max_new_tokens=4, compare_tolerance=0.1, tokenizer="bytes")
    report.save(tmp_path / "report.html")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator(".token").count() == 18
        assert not page.is_visible("#form")
        page.locator(".token").nth(6).hover()
        assert f"{report.tokens[6]['iterations']} iterations" in page.locator(".facts").first.text_content()
        assert page.locator("polyline").first.bounding_box()["height"] > 5
        assert page.locator(".answer").nth(1).locator(".segment").count() >= 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert errors == []
