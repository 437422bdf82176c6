"""``python -m implicit_blocks``: what is installed, and the schema of specs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from implicit_blocks import registry
from implicit_blocks.specs.schema import file_schema, run_schema


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 for an error that the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m implicit_blocks", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_list, _add_schema):
        add(commands)
    return parser


def _add_list(commands: Any) -> None:
    command = commands.add_parser("list", help="families, kinds, who brings them, and plugins that failed")
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
    command = commands.add_parser(
        "schema", help="JSON schema of a spec's YAML file, with every registered kind, for editors"
    )
    command.add_argument(
        "--complete", action="store_true", help="of a complete run spec instead, after extends and defaults"
    )
    command.set_defaults(command=_schema)


def _schema(options: argparse.Namespace) -> None:
    schema = run_schema() if options.complete else file_schema()
    print(json.dumps(schema, indent=2, ensure_ascii=False))


def _summary(spec: type[Any]) -> str:
    return (spec.__doc__ or "").strip().partition("\n")[0]


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
