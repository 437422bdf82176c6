"""Check and run the examples in the documentation: the fenced blocks of a page.

The info string of a block begins with its language: python, sh, yaml, toml, json, or text for blocks that are
only shown. Two settings may follow::

    title="mine.yaml"   the block is a file of that name in the folder in which the commands of the page run
    needs="slow"        what the block requires; see NEEDS

The fast tests run blocks without ``needs``, in order, with one namespace and one empty folder per page.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import yaml

from implicit_blocks.specs import load_spec

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"python", "sh", "yaml", "toml", "json", "text"}
NEEDS = {
    "": "nothing: the fast tests run it",
    "slow": "a minute or more: the slow tests run it",
    "gpu": "a CUDA device: the GPU tests run it",
    "cluster": "several machines, or their scheduler",
    "network": "a network",
    "data": "files of the reader",
    "hours": "hours",
    "context": "code around it",
}
"""Requirements of a block. Blocks that cannot be run are checked as far as possible."""
SHELL = {"cat", "cd", "cp", "echo", "export", "git", "lm_eval", "ls", "make", "mkdir", "pip", "source"}
"""Programs other than Python that examples may use without ``needs``."""
SHOWN = {"make", "pip", "git"}
"""Programs that would change the machine: their arguments are checked, and they are not run."""
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", flags=re.DOTALL | re.MULTILINE)
DIFFERENT = 1  # exit code of `python -m implicit_blocks diff` if the specs differ


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    needs: str
    title: str | None
    text: str

    @property
    def place(self) -> str:
        """The page and line, for messages."""
        return f"{self.page}, line {self.line}"


class Parsed(Exception):  # noqa: N818  # not an error: it ends a program after its arguments were parsed
    """The parsed arguments of a program."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("parsed")
        self.options = options


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page; raise ValueError for an unknown language or setting."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, match) for match in FENCE.finditer(text)]


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    indent, information, body = match.groups()
    line = text.count("\n", 0, match.start()) + 1
    language, _, settings = information.strip().partition(" ")
    given = dict(re.findall(r'(\w+)="([^"]*)"', settings))
    left = re.sub(r'\w+="[^"]*"', "", settings).strip()
    known = language in LANGUAGES and given.get("needs", "") in NEEDS and set(given) <= {"needs", "title"}
    if left or not known:
        raise ValueError(
            f"{page.name}, line {line}: unknown info string {information!r}; give a language of "
            f'{sorted(LANGUAGES)}, then title="FILE" or needs="…" with one of {sorted(NEEDS)[1:]}'
        )
    return Block(
        page=page.name,
        line=line,
        language=language,
        needs=given.get("needs", ""),
        title=given.get("title"),
        text="".join(part.removeprefix(indent) for part in body.splitlines(keepends=True)),
    )


@contextlib.contextmanager
def folder_of(page: Sequence[Block], folder: Path) -> Iterator[None]:
    """Change to a folder with the contents of a checkout and the files defined by the page's blocks."""
    for name in ("zoo", "plugins", "benchmarks"):
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    for block in page:
        if block.title is not None and re.fullmatch(r"[\w./-]+\.\w+", block.title):
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    with contextlib.chdir(folder):
        yield


# -------------------------------------------------------------------------------- checking


def check(block: Block, *, written_specs: frozenset[str] = frozenset()) -> None:
    """Check a block without running it, in the folder of its page.

    Args:
        block: the block.
        written_specs: names of specs that commands of the page write.

    """
    if block.language == "python":
        compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        content = yaml.safe_load(block.text)
        if block.needs == "" and block.title is None and isinstance(content, dict):
            Path("example.yaml").write_text(block.text, encoding="utf-8")
            load_spec(Path("example.yaml"))
        elif block.needs == "" and block.title is not None and block.title.endswith(".yaml"):
            load_spec(Path(block.title))
    elif block.language == "sh":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=60)
        for words in commands(block):
            _check_command(block, words, written_specs)


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block, without variable assignments."""
    found: list[list[str]] = []
    text = re.sub(r"\\\n", " ", block.text)
    text = re.sub(r"\$\([^()]*\)|\$\w+|\"\$@\"", "", text)  # the value is unknown here
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();|&"):
                while words and re.match(r"\w+=", words[0]):
                    words = words[1:]
                found += [words] if words else []
                words = []
            else:
                words.append(word)
    without = [
        words[: next((i for i, w in enumerate(words) if set(w) <= set("<>")), None)] for words in found
    ]
    return [_as_module(words) for words in without if words]  # without redirections


def _as_module(words: list[str]) -> list[str]:
    """Return a command by the console script as one by ``python -m``, so that this clone runs it."""
    return ["python", "-m", "implicit_blocks", *words[1:]] if words[0] == "implicit-blocks" else words


def specs_made(page: Sequence[Block]) -> frozenset[str]:
    """Return the names of the specs that ``new-plugin`` writes in the page's commands."""
    words = [w for block in page if block.language == "sh" for w in commands(block) if "new-plugin" in w]
    return frozenset(f"word_problem_s3_{w[w.index('new-plugin') + 1]}" for w in words)


def _check_command(block: Block, words: list[str], written_specs: frozenset[str]) -> None:
    programs = [i for i, word in enumerate(words) if Path(word).name in {"python", "python3", "torchrun"}]
    if not programs:
        program = Path(words[0]).name
        known = program in SHELL or block.needs in {"cluster", "network", "gpu", "context"} or not block.text
        assert known, f'{block.place}: unknown program {program}; add needs="…"'
        if program == "make":
            targets = re.findall(
                r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
            assert set(words[1:2]) <= set(targets), f"{block.place}: no such target: {words}"
        if program == "pip":
            _check_pip(block, words[1:])
        return
    words = words[programs[0] :]
    if Path(words[0]).name == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        words = [
            "python",
            *(["-m"] if options.module else []),
            options.training_script,
            *options.training_script_args,
        ]
    if words[1:3] == ["-m", "pip"]:
        _check_pip(block, words[3:])
        return
    if words[1:2] == ["-m"] and words[2].split(".")[0] in {"venv", "pytest", "mkdocs", "http"}:
        return
    if words[1:2] in ([], ["-c"]):
        return
    options = _parsed(block, words[1:])
    spec, overrides = getattr(options, "spec", None), list(getattr(options, "overrides", None) or [])
    a_run = str(spec).startswith("runs/")  # a run of the reader
    if spec is not None and str(spec) not in written_specs and not a_run:
        load_spec(spec, overrides)


def _check_pip(block: Block, words: Sequence[str]) -> None:
    """Check that the pip command, its options and the extras exist."""
    # pip has no public parser, and a process that has imported pip cannot import setuptools any more.
    code = "from pip._internal.commands import create_command as of; of(sys.argv[1]).parse_args(sys.argv[2:])"
    checked = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}", *words], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, f"{block.place}: {checked.stderr.strip()[-300:]}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        for extras in re.findall(r"^(?:implicit_blocks|\.)\[([\w,]+)\]", word):
            unknown = set(extras.split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"{block.place}: no such extra: {unknown}"


def _parsed(block: Block, words: list[str]) -> argparse.Namespace:
    """Return the parsed arguments of a program, which is started and ended after parsing."""

    def ended(original: Any) -> Any:
        def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
            raise Parsed(original(parser, args, namespace))

        return parse

    parsers = {
        name: ended(getattr(argparse.ArgumentParser, name))
        for name in ("parse_args", "parse_intermixed_args")
    }
    try:
        with mock.patch.multiple(argparse.ArgumentParser, **parsers):
            _start(words)
    except Parsed as parsed:
        return parsed.options
    except SystemExit as end:
        raise AssertionError(
            f"{block.place}: the program rejected its arguments ({end.code}): {shlex.join(words)}"
        ) from None
    raise AssertionError(f"{block.place}: the program parsed no arguments: {shlex.join(words)}")


# -------------------------------------------------------------------------------- running


def run(page: Sequence[Block], *, needs: frozenset[str]) -> dict[str, Any]:
    """Run the blocks of a page whose ``needs`` are in this set, in order, in the folder of the page.

    Returns:
        The namespace of the Python blocks.

    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in page:
        if block.needs not in needs:
            continue
        if block.language == "python":
            exec(compile(block.text, block.place, "exec"), namespace)
        elif block.language == "sh":
            _run_shell(block)
    return namespace


def _run_shell(block: Block) -> None:
    words_of = [words for words in commands(block) if Path(words[0]).name not in SHOWN]
    ours = [
        words[:2] == ["python", "-m"] and words[2].split(".")[0] in {"implicit_blocks", "trainer"}
        for words in words_of
    ]
    plain = not re.search(r"[|&;<>$`]|^\w+=", re.sub(r"'[^']*'|#.*", "", block.text), flags=re.MULTILINE)
    if plain and all(ours):
        for words in words_of:  # in this process, because it has imported torch already
            code = _start(words[1:])
            allowed = {0, None, DIFFERENT} if "diff" in words[:4] else {0, None}
            assert code in allowed, f"{block.place}: exit code {code}: {shlex.join(words)}"
        return
    if not words_of:
        return
    text = "\n".join(line for line in block.text.splitlines() if line.split(" ")[0] not in SHOWN)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env=_environment(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, f"{block.place}: exit code {done.returncode}\n{done.stdout}{done.stderr}"


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), ours.get("PATH", "")])
    modules = os.pathsep.join(filter(None, [str(ROOT), ours.get("PYTHONPATH", "")]))
    return {**ours, "PATH": path, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}


def _start(words: list[str]) -> Any:
    """Run ``python WORDS`` in this process: the ``main`` of a module, or a file."""
    if words[0] != "-m":
        with (
            mock.patch.object(sys, "argv", words),
            mock.patch.object(sys, "path", [str(Path(words[0]).parent), *sys.path]),
        ):
            return runpy.run_path(words[0], run_name="__main__")
    name = "implicit_blocks._utils.console" if words[1] == "implicit_blocks" else words[1]
    found = importlib.util.find_spec(name)
    assert found is not None, f"no module named {name}"
    module = importlib.import_module(f"{name}.__main__" if found.submodule_search_locations else name)
    with mock.patch.object(sys, "argv", [str(module.__file__), *words[2:]]):
        try:
            return module.main(words[2:])
        except SystemExit as end:
            return end.code if end.code != 2 else _refused(words)


def _refused(words: Sequence[str]) -> NoReturn:
    raise SystemExit(f"rejected: {shlex.join(words)}")
