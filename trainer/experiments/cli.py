"""The command line: ``python -m trainer.experiments jacobian | duality …``.

Each experiment writes a JSON file with every number and a picture. Exit codes: 0 done, 2 the request can't be
carried out (said in a sentence), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

REFUSED = 2
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m trainer.experiments", description="The paper's experiments."
    )
    commands = made.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    jacobian = commands.add_parser(
        "jacobian", help="Theorem 1 and Figure 7: the Jacobian from state to state, three ways"
    )
    jacobian.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and tokens (0)")
    jacobian.add_argument("--tokens", type=int, default=16, metavar="N", help="length of the sequence (16)")
    jacobian.add_argument("--width", type=int, default=64, metavar="N", help="d_model (64, the paper's)")
    jacobian.add_argument(
        "--dt",
        type=float,
        nargs=2,
        default=(0.001, 0.1),
        metavar=("MIN", "MAX"),
        help="range of the initial step sizes (0.001 0.1, Mamba2's); larger ones couple the state more",
    )
    jacobian.add_argument("--tolerance", type=float, default=1e-12, metavar="X", help="(1e-12)")
    jacobian.add_argument("--max-iterations", type=int, default=512, metavar="N", help="(512)")
    duality = commands.add_parser(
        "duality", help="sequential against simultaneous evaluation of a trained model, over tolerances"
    )
    duality.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN",
        help="a run's folder, or one of its checkpoints",
    )
    duality.add_argument(
        "--tolerances", type=float, nargs="+", default=[0.05, 1e-2, 1e-3, 1e-4, 1e-5], metavar="X"
    )
    duality.add_argument("--sequences", type=int, default=16, metavar="N", help="of evaluation data (16)")
    duality.add_argument("--length", type=int, metavar="N", help="tokens each (default: the training length)")
    duality.add_argument(
        "--max-iterations", type=int, metavar="N", help="of each search (default: the evaluation's)"
    )
    duality.add_argument("--double", action="store_true", help="compute in float64")
    duality.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda where there is one)")
    for command in (jacobian, duality):
        command.add_argument(
            "--output", type=Path, metavar="DIR", help="folder to write (experiments/<name>-<time>)"
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        from trainer.run_folder import default_folder

        folder: Path = options.output or default_folder(options.experiment, root=Path("experiments"))
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"the output {folder} is a file, not a folder; give another one by --output")
        if options.experiment == "jacobian":
            from trainer.experiments.jacobian import run as run_jacobian

            text = run_jacobian(
                folder,
                seed=options.seed,
                tokens=options.tokens,
                width=options.width,
                dt=tuple(options.dt),
                tolerance=options.tolerance,
                max_iterations=options.max_iterations,
            )
        else:
            from trainer.experiments.duality import run as run_duality

            text = run_duality(
                folder,
                options.checkpoint,
                tolerances=options.tolerances,
                sequences=options.sequences,
                length=options.length,
                max_iterations=options.max_iterations,
                double=options.double,
                device=options.device,
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("error: stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    print(text)
    return 0
