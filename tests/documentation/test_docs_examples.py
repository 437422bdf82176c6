"""The examples on the pages are valid and run; each page is a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documentation_examples", ROOT / "tools/docs/examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


examples = _load()

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def marked(needs: str) -> list[Path]:
    """Return the pages with a block that is run and has these needs; a page may be slow as a whole."""
    pages = []
    for path in PAGES:
        try:
            run = [block for block in examples.blocks(path) if block.language in {"python", "sh"}]
        except ValueError:
            continue  # test_examples_of_a_page_are_valid reports it
        if needs in {block.needs for block in run} and (needs or run[0].needs != "slow"):
            pages.append(path)
    return pages


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_examples_of_a_page_are_valid(path, tmp_path):
    page = examples.blocks(path)
    with examples.folder_of(page, tmp_path):
        for block in page:
            try:
                examples.check(block, written_specs=examples.specs_made(page))
            except Exception as error:
                raise AssertionError(f"{block.place}: {error}") from error


@pytest.mark.parametrize("path", marked(""), ids=name)
def test_examples_of_a_page_run(path, tmp_path):
    page = examples.blocks(path)
    assert page
    with examples.folder_of(page, tmp_path):
        examples.run(page, needs=frozenset({""}))


@pytest.mark.slow
@pytest.mark.parametrize("path", marked("slow"), ids=name)
def test_slow_examples_of_a_page_run(path, tmp_path):
    page = examples.blocks(path)
    assert page
    with examples.folder_of(page, tmp_path):
        examples.run(page, needs=frozenset({"", "slow"}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("path", marked("gpu"), ids=name)
def test_gpu_examples_of_a_page_run(path, tmp_path):
    page = examples.blocks(path)
    assert page
    with examples.folder_of(page, tmp_path):
        examples.run(page, needs=frozenset({"", "gpu"}))


def page_of(text: str, folder: Path) -> list[object]:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return examples.blocks(path)


@pytest.mark.parametrize(
    "command",
    [
        "python -m trainer --spec word_problem_s4",
        "python -m trainer --spec word_problem_s3 training.max_step=3",
        "python -m trainer --spec word_problem_s3 --no-such-option",
        "python -m implicit_blocks describe word_problem_s4",
        "python -m implicit_blocks paint word_problem_s3",
        "python -m trainer.nothing",
        "torchrun --nproc-per-node 2 -m trainer --spec word_problem_s3 modell.d_model=3",
        "torchrun --no-such-option 2 -m trainer --spec word_problem_s3",
        "make coffee",
        "pip install 'implicit_blocks[coffee]'",
        "python -m pip install --no-such-option torch",
        "pip fetch torch",
        "frobnicate --all",
        "echo 'unclosed",
    ],
)
def test_invalid_commands_are_rejected(command, tmp_path):
    page = page_of(f"```sh\n{command}\n```\n", tmp_path)
    with examples.folder_of(page, tmp_path), pytest.raises((Exception, SystemExit)):
        examples.check(page[0])


def test_commands_of_pip_are_checked_in_another_process(tmp_path):
    page = page_of("```sh\npip install -e .\n```\n", tmp_path)
    before = set(sys.modules)
    with examples.folder_of(page, tmp_path):
        examples.check(page[0])
    assert not {name for name in sys.modules.keys() - before if name.partition(".")[0] == "pip"}


@pytest.mark.parametrize(
    "block",
    [
        "```python\nx = (\n```\n",
        "```yaml\nextends: word_problem_s3\ndata: {grupp: A4}\n```\n",
        '```yaml needs="context"\na: [1\n```\n',
        "```toml\na =\n```\n",
        "```json\n{\n```\n",
    ],
)
def test_invalid_blocks_are_rejected(block, tmp_path):
    page = page_of(block, tmp_path)
    with (
        examples.folder_of(page, tmp_path),
        pytest.raises((ValueError, SyntaxError, examples.yaml.YAMLError)),
    ):
        examples.check(page[0])


@pytest.mark.parametrize("information", ["bash", "python gpu", 'sh needs="luck"', 'sh colour="red"'])
def test_unknown_info_strings_are_rejected(information, tmp_path):
    with pytest.raises(ValueError, match="give a language"):
        page_of(f"```{information}\n```\n", tmp_path)


def test_blocks_of_a_page_share_a_namespace_and_a_folder(tmp_path):
    page = page_of(
        '```yaml title="mine.yaml"\nextends: word_problem_s3\ntraining: {max_steps: 5}\n```\n'
        "```python\nimport implicit_blocks as ib\nsteps = ib.load_spec('mine.yaml').total_steps\n```\n"
        '```python needs="hours"\nsteps = 0\n```\n'
        "```sh\npython -m implicit_blocks diff word_problem_s3 mine.yaml   # exits with 1\n```\n"
        "```sh\necho $((5 + 1)) > written.txt\nmake demo\n```\n"
        "```python\nfrom pathlib import Path\nwritten = Path('written.txt').read_text()\n```\n",
        tmp_path,
    )
    with examples.folder_of(page, tmp_path):
        names = examples.run(page, needs=frozenset({""}))
    assert (names["steps"], names["written"]) == (5, "6\n")


def test_a_failing_command_fails_its_page(tmp_path):
    page = page_of("```sh\nls there-is-no-such-file\n```\n", tmp_path)
    with examples.folder_of(page, tmp_path), pytest.raises(AssertionError, match=r"page.md, line 1"):
        examples.run(page, needs=frozenset({""}))
