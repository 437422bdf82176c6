"""Compare this library with tensors that published implementations computed: golden cases.

    python benchmarks/golden.py CASE_FOLDER …

A case is a folder with ``config.json`` (the published configuration, or ``{"architecture": name, "config":
{…}}``), ``weights.safetensors`` and ``expected.safetensors``. The program builds the model by the converter,
computes every expected tensor and every gradient, and prints the relative error ``‖found − expected‖ /
‖expected‖`` of each. It exits with 1 if an error is above its bar, or if an expected tensor was not compared.

The bars: 1e-5 for values, 1e-4 for gradients, 1e-10 for values in float64 (names that begin with ``f64/``),
and equality for whole numbers. A case may have wider bars where the published number is itself sensitive;
the table names the reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from golden_cases import compute
from golden_cases.case import Case, Row


def main(arguments: list[str] | None = None) -> int:
    """Compare all cases, print a table of each, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="CASE_FOLDER")
    parser.add_argument("--quiet", action="store_true", help="print failed rows and summaries only")
    options = parser.parse_args(arguments)
    failed = 0
    for folder in options.folders:
        try:
            case = Case.load(folder)
            compute(case)
        except (ValueError, OSError) as error:
            print(f"error: {folder}: {error}", file=sys.stderr)
            failed += 1
            continue
        failed += report(case, quiet=options.quiet)
    return 1 if failed else 0


def report(case: Case, *, quiet: bool = False) -> bool:
    """Print the table of a case; return whether it failed."""
    rows, missing = case.rows, case.not_compared
    width = max((len(row.name) for row in rows), default=0)
    print(f"{case.folder.name} ({case.architecture})")
    for row in rows:
        if not (quiet and row.passed):
            print(f"  {row.name:{width}}  {_of(row)}")
    for name in missing:
        print(f"  {name:{width}}  NOT COMPARED")
    usual = [row for row in rows if not row.reason]
    values = [row.error for row in usual if not row.precise and not row.gradient]
    gradients = [row.error for row in usual if row.gradient]
    precise = [row.error for row in usual if row.precise]
    bad = sum(not row.passed for row in rows)
    parts = [f"{len(rows)} tensors compared", f"{bad} above their bars", f"{len(missing)} not compared"]
    for name, errors in (("value", values), ("gradient", gradients), ("float64 value", precise)):
        if errors:
            parts.append(f"largest error of a {name} {max(errors):.1e}")
    print(f"  {'FAILED' if bad or missing else 'passed'}: {'; '.join(parts)}\n")
    return bool(bad or missing)


def _of(row: Row) -> str:
    mark = "" if row.passed else "  ABOVE"
    reason = f"  ({row.reason})" if row.reason else ""
    return f"{row.error:8.1e}  bar {row.bar:7.1e}{mark}{reason}"


if __name__ == "__main__":
    torch.set_num_threads(1)  # the order of sums, and therefore rounding, does not depend on the machine
    sys.exit(main())
