"""What a run records of the packages that its operators use."""

from __future__ import annotations

import torch

from implicit_blocks.ops import accelerated


def test_without_a_gpu_nothing_is_imported_and_every_package_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerated, "load", None)
    assert accelerated.report() == dict.fromkeys(accelerated.PACKAGES, "not used: no GPU")


def test_with_one_a_package_has_its_version_or_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerated, "PACKAGES", {"torch": "torch", "nobody": "no_such_package"})
    monkeypatch.setattr(accelerated, "_FOUND", {})
    assert accelerated.report() == {
        "torch": accelerated.metadata.version("torch"),
        "nobody": "not used: no_such_package is not installed",
    }


def test_a_package_that_warns_as_it_is_imported_can_be_used(tmp_path, monkeypatch):
    (tmp_path / "old_fashioned.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(accelerated, "_FOUND", {})
    assert accelerated.load("old_fashioned").__name__ == "old_fashioned"
