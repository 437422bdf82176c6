"""The record of packages that operators use."""

from __future__ import annotations

import torch

from implicit_blocks.ops import accelerated


def test_without_a_gpu_no_package_is_imported_and_each_has_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerated, "load", None)
    assert accelerated.report() == dict.fromkeys(accelerated.PACKAGES, "not used: no GPU")


def test_with_a_gpu_each_package_has_a_version_or_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerated, "PACKAGES", {"torch": "torch", "nobody": "no_such_package"})
    monkeypatch.setattr(accelerated, "_FOUND", {})
    assert accelerated.report() == {
        "torch": accelerated.metadata.version("torch"),
        "nobody": "not used: no_such_package is not installed",
    }


def test_a_package_that_warns_on_import_is_usable(tmp_path, monkeypatch):
    (tmp_path / "old_fashioned.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(accelerated, "_FOUND", {})
    assert accelerated.load("old_fashioned").__name__ == "old_fashioned"
