"""The page on backends states what has not been timed, and why."""

from __future__ import annotations

from tests.documentation.tables import results, words


def test_backends_that_were_not_timed_have_a_reason_that_holds():
    rows = [row for name in ("backends", "backends_attention") for row in results(name)["backends"]]
    assert {row["untested"] for row in rows if "untested" in row} == {
        "no backward pass on Hopper GPUs with Triton before 3.7.1"
    }
    (row,) = (row for row in rows if row["work"].startswith("convolution"))
    text = f"`{row['backend']}` has been timed: {row['forward_ms']:.2f} ms forward and"
    assert f"{text} {row['both_ms']:.2f} ms with its backward pass" in words("docs/backends.md")
