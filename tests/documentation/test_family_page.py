"""The differences between specs on the page about the family of models are those of the command."""

import re
from pathlib import Path

import pytest

from implicit_blocks.__main__ import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "family.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["attractor.yaml", "parcae.yaml"])
def test_the_differences_are_those_of_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for title, text in re.findall(r'```yaml title="(\w+\.yaml)"\n(.*?)```', PAGE, re.DOTALL):
        (tmp_path / title).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    main(["diff", "paper.yaml", name])
    printed = "\n".join(map(str.rstrip, capsys.readouterr().out.rstrip().splitlines()))
    assert f"```text\n{printed}\n```" in PAGE
