"""List components, inspect specs, create plugins, convert checkpoints, generate text, and serve models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from implicit_blocks import __version__, registry
from implicit_blocks._utils.arguments import add_model_arguments, optional_packages
from implicit_blocks._utils.hints import without_torch
from implicit_blocks._utils.programs import CommandParser
from implicit_blocks.registry.scaffold import FAMILIES
from implicit_blocks.serving.command import add_inspect_arguments, add_serve_arguments
from implicit_blocks.specs import load_spec, spec_name
from implicit_blocks.specs.schema import file_schema, run_schema


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a user error, 1 for specs that differ."""
    options = parser().parse_args(arguments)
    try:
        return options.command(options) or 0
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        print(f"error: {without_torch(error)}", file=sys.stderr)
    except (ValueError, OSError) as error:  # such as a directory that cannot be written
        print(f"error: {error}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="python -m implicit_blocks",
        description=__doc__,
        epilog="COMMAND --help describes a command.",
    )
    command.add_argument("--version", action="version", version=f"implicit_blocks {__version__}")
    commands = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_list,
        _add_schema,
        _add_describe,
        _add_diff,
        _add_new_plugin,
        _add_convert,
        _add_export,
        _add_generate,
        _add_serve,
        _add_inspect,
    ):
        add(commands)
    return command


def _add(commands: Any, name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
    """Add a command with its summary, in the list of commands and in its own help."""
    description = f"{summary[0].upper()}{summary[1:]}."
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, **options
    )
    return added


def _add_list(commands: Any) -> None:
    command = _add(commands, "list", "list kinds, their distributions, and plugins that failed")
    command.set_defaults(command=_list)


def _list(options: argparse.Namespace) -> None:
    rows = [
        (family, kind, entry.owner, entry.version, _summary(entry.spec))
        for family in registry.families()
        for kind in registry.kinds(family)
        for entry in [registry.entry(family, kind)]
    ]
    _print_table([("FAMILY", "KIND", "OWNER", "VERSION", "DESCRIPTION"), *rows])
    failures = registry.failures()
    if failures:
        print("\nNot in use:")
        _print_table(
            [(f"  {failed.name}", failed.owner, failed.version, failed.reason) for failed in failures]
        )
    if registry.switched_off():
        print(f"\nDisabled by {registry.PLUGINS_VARIABLE}: {', '.join(registry.switched_off())}")


def _add_schema(commands: Any) -> None:
    command = _add(
        commands, "schema", "print the JSON schema of spec files, with every registered kind, for editors"
    )
    command.add_argument(
        "--complete",
        action="store_true",
        help="print the schema of complete run specs, after merging",
    )
    command.set_defaults(command=_schema)


def _schema(options: argparse.Namespace) -> None:
    schema = run_schema() if options.complete else file_schema()
    print(json.dumps(schema, indent=2, ensure_ascii=False))


def _add_new_plugin(commands: Any) -> None:
    command = _add(commands, "new-plugin", "create an installable plugin from a template")
    command.add_argument("name", help="lower-case identifier; also the kind that the plugin provides")
    command.add_argument("--family", required=True, choices=FAMILIES, help="family of the component")
    command.add_argument("--directory", type=Path, help="new or empty directory (default: ./NAME)")
    command.set_defaults(command=_new_plugin)


def _new_plugin(options: argparse.Namespace) -> None:
    from implicit_blocks.registry.scaffold import create_plugin

    folder = create_plugin(options.name, family=options.family, directory=options.directory)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    print(
        f"Wrote {shown}. Next steps:\n"
        f"  python -m pip install -e '{shown}[test]'\n"
        f"  implicit-blocks train --spec word_problem_s3_{options.name}\n"
        f"  python -m pytest {shown}"
    )


def _add_describe(commands: Any) -> None:
    command = _add(
        commands,
        "describe",
        "show a spec's model as a tree with shapes and parameters, its search settings and its phases",
    )
    command.add_argument("spec", help="name in the zoo, or YAML file")
    command.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="overrides of the spec")
    command.set_defaults(command=_describe)


def _describe(options: argparse.Namespace) -> None:
    from implicit_blocks.describing import draw_run
    from implicit_blocks.describing.drawing import show

    show(draw_run(load_spec(options.spec, options.overrides), name=spec_name(options.spec)))


def _add_diff(commands: Any) -> None:
    command = _add(
        commands,
        "diff",
        "show the differences between two specs, after extends and defaults",
        epilog="Exit codes: 0 if the specs are equal, 1 if they differ, 2 for errors.",
    )
    command.add_argument("old", help="name in the zoo, or YAML file")
    command.add_argument("new", help="name in the zoo, or YAML file")
    command.add_argument(
        "overrides", nargs="*", metavar="path.to.key=value", help="overrides of the new spec"
    )
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
        "convert published models, or language models of transformers, and back",
    )
    command.add_argument("source", type=Path, help="directory with config.json and weights")
    command.add_argument("destination", type=Path, help="new directory")
    command.add_argument(
        "--to",
        choices=("transformers", "published", "original"),
        default="transformers",
        help="format of the result: for from_pretrained; for the paper's code; or, of an explicit model, "
        "transformers' own class, such as Llama (default: transformers)",
    )
    command.add_argument(
        "--implicit",
        action="store_true",
        help="convert an explicit model to the initial weights of an implicit one",
    )
    command.add_argument(
        "--core",
        metavar="FIRST:STOP",
        help="iterate these layers of an explicit model, numbered from 0, without layer STOP; its function "
        "stays the same until training",
    )
    command.add_argument(
        "--fold-weight-norm",
        action="store_true",
        help="fold weight norm into the weights; the function stays the same",
    )
    command.add_argument("--max-shard-size", default="5GB", help="maximum size per file (default: 5GB)")
    command.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> None:
    from implicit_blocks.hf.convert import convert

    with optional_packages():
        convert(
            options.source,
            options.destination,
            to=options.to,
            implicit=options.implicit,
            core=options.core,
            fold=options.fold_weight_norm,
            max_shard_size=options.max_shard_size,
        )


def _add_export(commands: Any) -> None:
    command = _add(commands, "export", "save a spec's model as a pretrained folder for transformers")
    command.add_argument("spec", help="run directory; or, with new weights, name in the zoo or YAML file")
    command.add_argument("destination", type=Path, help="new directory")
    command.add_argument(
        "--checkpoint", type=Path, help="checkpoint, run directory or weights file to load instead"
    )
    command.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, a directory with one, or bytes, to include (default: that of the run's data)",
    )
    command.add_argument("--seed", type=int, help="seed of new weights (default: 0)")
    command.add_argument("--max-shard-size", default="5GB", help="maximum size per file (default: 5GB)")
    command.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    from implicit_blocks.hf.convert import export

    with optional_packages():
        export(
            options.spec,
            options.destination,
            checkpoint=options.checkpoint,
            tokenizer=options.tokenizer,
            seed=options.seed,
            max_shard_size=options.max_shard_size,
        )


def _add_generate(commands: Any) -> None:
    command = _add(commands, "generate", "continue prompts with a trained model")
    add_model_arguments(command)
    command.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text; without a tokenizer, token ids: '0 3 2'"
    )
    command.add_argument(
        "--max-new-tokens",
        type=int,
        default=50,
        metavar="N",
        help="maximum number of new tokens per prompt (default: 50)",
    )
    command.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0 selects the most likely token (default: 0)",
    )
    command.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    command.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the smallest set of tokens with total probability P",
    )
    command.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from tokens with at least this share of the largest probability",
    )
    command.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="divide the positive logits of tokens in the text by X, multiply the negative ones",
    )
    command.add_argument(
        "--stop", nargs="+", default=(), metavar="TEXT", help="end a continuation before the first of these"
    )
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: 0)")
    command.add_argument(
        "--tolerance", type=float, metavar="X", help="search tolerance (default: the spec's)"
    )
    command.set_defaults(command=_generate)


def _generate(options: argparse.Namespace) -> None:
    from implicit_blocks.decoding.command import continue_prompts

    with optional_packages():
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
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            stop=options.stop,
            seed=options.seed,
            tolerance=options.tolerance,
        )


def _add_serve(commands: Any) -> None:
    add_serve_arguments(_add(commands, "serve", "serve a trained model over HTTP, with OpenAI's API"))


def _add_inspect(commands: Any) -> None:
    add_inspect_arguments(_add(commands, "inspect", "write a report of a text's searches as one HTML file"))


def _summary(spec: type[Any]) -> str:
    return (spec.__doc__ or "").strip().partition("\n")[0].replace("`", "")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    from implicit_blocks._utils import console

    sys.exit(console.main(script="python -m implicit_blocks"))
