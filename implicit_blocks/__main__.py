"""What is installed, specs and their schema, new plugins, checkpoints of other programs, generation."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from implicit_blocks import __version__, registry
from implicit_blocks._utils.hints import without_torch
from implicit_blocks.registry.scaffold import FAMILIES
from implicit_blocks.specs import load_spec, spec_name
from implicit_blocks.specs.schema import file_schema, run_schema


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 for an error that the user can mend, 1 for specs that differ."""
    options = parser().parse_args(arguments)
    code = 0
    try:
        code = options.command(options) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough: `… schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    except ModuleNotFoundError as error:
        print(f"error: {without_torch(error)}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:  # such as a folder that can't be written
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m implicit_blocks",
        description=__doc__,
        epilog="Training is python -m trainer; --help of each command says more.",
    )
    made.add_argument("--version", action="version", version=f"implicit_blocks {__version__}")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_list,
        _add_schema,
        _add_describe,
        _add_diff,
        _add_new_plugin,
        _add_convert,
        _add_export,
        _add_generate,
    ):
        add(commands)
    return made


def _add(commands: Any, name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
    """Add a command whose own help says what it is, as the list of commands does."""
    description = f"{summary[0].upper()}{summary[1:]}."
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, **options
    )
    return added


def _add_list(commands: Any) -> None:
    command = _add(commands, "list", "families, kinds, who brings them, and plugins that failed")
    command.set_defaults(command=_list)


def _list(options: argparse.Namespace) -> None:
    rows = [
        (family, kind, entry.owner, entry.version, _summary(entry.spec))
        for family in registry.families()
        for kind in registry.kinds(family)
        for entry in [registry.entry(family, kind)]
    ]
    _print_table([("FAMILY", "KIND", "OWNER", "VERSION", "WHAT IT IS"), *rows])
    failures = registry.failures()
    if failures:
        print("\nNot in use:")
        _print_table(
            [(f"  {failed.name}", failed.owner, failed.version, failed.reason) for failed in failures]
        )
    if registry.switched_off():
        print(f"\nSwitched off by {registry.PLUGINS_VARIABLE}: {', '.join(registry.switched_off())}")


def _add_schema(commands: Any) -> None:
    command = _add(
        commands, "schema", "JSON schema of a spec's YAML file, with every registered kind, for editors"
    )
    command.add_argument(
        "--complete", action="store_true", help="of a complete run spec instead, after extends and defaults"
    )
    command.set_defaults(command=_schema)


def _schema(options: argparse.Namespace) -> None:
    schema = run_schema() if options.complete else file_schema()
    print(json.dumps(schema, indent=2, ensure_ascii=False))


def _add_new_plugin(commands: Any) -> None:
    command = _add(commands, "new-plugin", "write an installable plugin to start from")
    command.add_argument("name", help="an identifier in lower case: the kind that it brings")
    command.add_argument("--family", required=True, choices=FAMILIES, help="what it is to be")
    command.add_argument("--directory", type=Path, help="folder, new or empty (./NAME)")
    command.set_defaults(command=_new_plugin)


def _new_plugin(options: argparse.Namespace) -> None:
    from implicit_blocks.registry.scaffold import create_plugin

    folder = create_plugin(options.name, family=options.family, directory=options.directory)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    print(
        f"Wrote {shown}. What now:\n"
        f"  python -m pip install -e '{shown}[test]'\n"
        f"  python -m trainer --spec word_problem_s3_{options.name}\n"
        f"  python -m pytest {shown}"
    )


def _add_describe(commands: Any) -> None:
    command = _add(
        commands,
        "describe",
        "a spec's model as a tree with shapes and parameters, its search and its phases",
    )
    command.add_argument("spec", help="name in the zoo, or YAML file")
    command.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="changes to the spec")
    command.set_defaults(command=_describe)


def _describe(options: argparse.Namespace) -> None:
    from implicit_blocks.describing import draw_run
    from implicit_blocks.describing.drawing import show

    show(draw_run(load_spec(options.spec, options.overrides), name=spec_name(options.spec)))


def _add_diff(commands: Any) -> None:
    command = _add(
        commands,
        "diff",
        "what two specs differ in, with all that they extend and every default",
        epilog="Exit codes are those of diff: 0 for specs that say the same, 1 for others, 2 for trouble.",
    )
    command.add_argument("old", help="name in the zoo, or YAML file")
    command.add_argument("new", help="the same")
    command.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="changes to the second")
    command.set_defaults(command=_diff)


def _diff(options: argparse.Namespace) -> int:
    from implicit_blocks.describing import changes, draw_changes
    from implicit_blocks.describing.drawing import show

    old, new = load_spec(options.old), load_spec(options.new, options.overrides)
    found = changes(old, new)
    if found:
        show(draw_changes(found, old=options.old, new=" ".join([options.new, *options.overrides])))
    return 1 if found else 0


def _add_convert(commands: Any) -> None:
    command = _add(
        commands,
        "convert",
        "a published checkpoint, a Llama or Mamba2 of transformers, into one of ours; or back",
    )
    command.add_argument("source", type=Path, help="folder with config.json and weights")
    command.add_argument("destination", type=Path, help="new folder")
    command.add_argument(
        "--to",
        choices=("transformers", "published"),
        default="transformers",
        help="what the new folder is for: from_pretrained, or the paper's code (transformers)",
    )
    command.add_argument(
        "--implicit",
        action="store_true",
        help="make an explicit model the start of an implicit one, to be fine-tuned",
    )
    command.add_argument(
        "--fold-weight-norm",
        action="store_true",
        help="the same function without weight norm",
    )
    command.add_argument("--max-shard-size", default="5GB", help="size of a file of weights (5GB)")
    command.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> None:
    from implicit_blocks.hf.convert import convert

    with _packages_asked_for():
        convert(
            options.source,
            options.destination,
            to=options.to,
            implicit=options.implicit,
            fold=options.fold_weight_norm,
            max_shard_size=options.max_shard_size,
        )


def _add_export(commands: Any) -> None:
    command = _add(commands, "export", "a spec's model as a folder of transformers")
    command.add_argument(
        "spec", help="a run's folder; or for fresh weights a name in the zoo, or a YAML file"
    )
    command.add_argument("destination", type=Path, help="new folder")
    command.add_argument(
        "--checkpoint", type=Path, help="other weights, the trainer's checkpoint, or a run's folder"
    )
    command.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, a folder with one, or bytes, to go along (default: that of a run's data)",
    )
    command.add_argument("--seed", type=int, help="of fresh weights (0)")
    command.add_argument("--max-shard-size", default="5GB", help="size of a file of weights (5GB)")
    command.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    from implicit_blocks.hf.convert import export

    with _packages_asked_for():
        export(
            options.spec,
            options.destination,
            checkpoint=options.checkpoint,
            tokenizer=options.tokenizer,
            seed=options.seed,
            max_shard_size=options.max_shard_size,
        )


def _add_generate(commands: Any) -> None:
    command = _add(commands, "generate", "continue prompts by a trained model")
    command.add_argument(
        "source", type=Path, help="a run's folder, a checkpoint, an exported folder, or a file of weights"
    )
    command.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text, or without a tokenizer numbers: '0 3 2'"
    )
    command.add_argument("--spec", help="name in the zoo, or YAML file, where the source doesn't say")
    command.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, a folder with one, or bytes (default: that in the source, or of a run's data)",
    )
    command.add_argument("--max-new-tokens", type=int, default=50, metavar="N", help="of each prompt (50)")
    command.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token (0)")
    command.add_argument("--top-k", type=int, metavar="K", help="draw among so many of the likeliest")
    command.add_argument("--top-p", type=float, metavar="P", help="draw among those that together have it")
    command.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    command.add_argument("--tolerance", type=float, metavar="X", help="of the search, instead of the spec's")
    command.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda where there is one)")
    command.set_defaults(command=_generate)


def _generate(options: argparse.Namespace) -> None:
    from implicit_blocks.decoding.command import continue_prompts

    with _packages_asked_for():
        continue_prompts(
            options.source,
            options.prompts,
            spec=options.spec,
            tokenizer=options.tokenizer,
            device=options.device,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            tolerance=options.tolerance,
        )


@contextlib.contextmanager
def _packages_asked_for() -> Iterator[None]:
    """Make a package of an extra that is missing the user's to mend; another one is a mistake here."""
    try:
        yield
    except ImportError as error:
        if error.name != "transformers":
            raise
        raise ValueError(str(error)) from None


def _summary(spec: type[Any]) -> str:
    return (spec.__doc__ or "").strip().partition("\n")[0]


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
