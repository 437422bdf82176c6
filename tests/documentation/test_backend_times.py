"""The page on backends states what has not been timed, and why."""

from __future__ import annotations

from tests.documentation.tables import results, words


def test_backends_that_were_not_timed_have_a_reason_that_holds():
    rows = [row for name in ("backends", "backends_attention") for row in results(name)["backends"]]
    assert {row["untested"] for row in rows if "untested" in row} == {
        "no backward pass on Hopper GPUs with Triton before 3.7.1"
    }
    page = words("docs/backends.md")
    cuda, fla, torch = results("backends_convolution")["backends"]
    assert [row["backend"] for row in (cuda, fla, torch)] == ["causal-conv1d", "fla", "torch"]
    text = f"take {cuda['forward_ms']:.2f} ms forward and {cuda['both_ms']:.2f} ms with their backward pass"
    text = f"{text} (`causal-conv1d`), and {torch['forward_ms']:.2f} and {torch['both_ms']:.2f} ms (`torch`)"
    assert f"{text}. That of `fla` takes {fla['forward_ms']:.2f} ms forward" in page
    assert "40 s, including autotuning" in fla["untested"]
    assert "its backward pass was still autotuning after 40 s" in page
