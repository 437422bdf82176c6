"""The tables of gpu.py: measured figures beside published figures, targets and stretch targets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_workloads import WORKS

BEGIN, END = "<!-- benchmarks/gpu.py --quote -->\n\n", "\n<!-- end of quote -->\n"
Row = dict[str, Any]


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class Figure:
    """A row of the table: how to read the figure from the programs' rows, and what to compare it with."""

    work: str
    programs: str | tuple[str, ...]
    read: Callable[[list[Row]], float | None]
    unit: str
    published: float | None = None
    target: float | None = None
    stretch_target: float | None = None
    higher_is_better: bool = True
    share: Callable[[list[Row]], float | None] | None = None
    """Reads the utilization: a share of the measured matrix-multiplication throughput of an H100."""

    @property
    def names(self) -> tuple[str, ...]:
        """The programs that must have finished."""
        return (self.programs,) if isinstance(self.programs, str) else self.programs

    def row(self, programs: dict[str, Row]) -> Row:
        """Return the row; a row without a figure has the reason."""
        found = [programs.get(name, {"failed": "not requested"}) for name in self.names]
        rows = [row for program in found for row in program.get("rows", [])]
        whole = all(program.get("rows") for program in found)
        good = [row for row in rows if "failed" not in row]
        value = self.read(good) if whole else None
        line: Row = {
            "work": self.work.replace(" x ", " \u00d7 "),
            "unit": self.unit,
            "published": self.published,
            "measured": value,
            "target": self.target,
            "stretch_target": self.stretch_target,
            "reached": None,
        }
        if value is None:
            why = [program["failed"] for program in found if "failed" in program]
            why += [last_line(row["failed"]) for row in rows if "failed" in row]
            line["not_measured"] = next(iter(why), "no such row")
        elif self.target is not None:
            line["reached"] = value >= self.target if self.higher_is_better else value <= self.target
        if value is not None and self.share is not None:
            line["share_of_card"] = self.share(good)
        if value is not None and any(program.get("disturbed") for program in found):
            line["disturbed"] = True
        return line


def of(key: str, **wanted: Any) -> Callable[[list[Row]], float | None]:
    """Return a reader of one entry of the row that has these values."""

    def read(rows: list[Row]) -> float | None:
        fitting = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
        return next((row.get(key) for row in fitting), None)

    return read


def worst(*keys: str, **wanted: Any) -> Callable[[list[Row]], float | None]:
    """Return a reader of the largest of some entries, over the rows that have these values."""

    def read(rows: list[Row]) -> float | None:
        fitting = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
        found = [row[key] for row in fitting for key in keys if row.get(key) is not None]
        return max(found, default=None)

    return read


def of_bounded(family: str) -> Callable[[list[Row]], float | None]:
    """Return a reader of the FLOP/s of the free phase relative to the bounded phase."""

    def read(rows: list[Row]) -> float | None:
        shares = [of("share_of_card", work=f"{family}_{phase}")(rows) for phase in ("free", "bounded")]
        free, bounded = shares
        return round(free / bounded, 3) if free and bounded else None

    return read


def farther(mode: str) -> Callable[[list[Row]], float | None]:
    """Return a reader of the largest ratio of our distance to that of the published rule."""

    def read(rows: list[Row]) -> float | None:
        ratios = [
            row["distance"] / row["published_distance"]
            for row in rows
            if row["mode"] == mode and row["published_distance"] and row["tight_converged"]
        ]
        return round(max(ratios), 4) if ratios else None

    return read


def trained(
    work: str,
    program: str,
    text: str,
    *,
    target: int | None = None,
    stretch_target: int | None = None,
    search_dtype: str | None = None,
) -> Figure:
    keys = ("tokens_per_second", "share_of_card")
    read, share = (of(key, work=work, search_dtype=search_dtype) for key in keys)
    published = WORKS[work].tokens_per_second
    return Figure(text, program, read, "tokens/s", published, target, stretch_target, share=share)


def memory(text: str, program: str, key: str) -> Figure:
    work = f"{program}_bounded"
    read, published = of(key, work=work), WORKS[work].peak_gb
    return Figure(text, program, read, "GB", published, published, None, False)


def decoded(
    text: str, *, published: float | None, target: float, stretch_target: float, **wanted: Any
) -> Figure:
    program = "decoding_mamba2" if wanted["model"].startswith("mamba2") else "decoding_llama"
    return Figure(
        text, program, of("ms", **wanted), "ms per iteration", published, target, stretch_target, False
    )


FLOAT32 = ["bfloat16", "float32"]  # the state types in decoding.py's rows: convolution state, h
TRAINING = ("llama_1.3b", "llama_130m", "mamba2_1.3b", "mamba2_130m", "state_tracking")
TRACKED = WORKS["state_tracking"].tokens_per_second
FIGURES = [
    trained("llama_1.3b_bounded", "llama_1.3b", "llama 1.3B (4+1), 4 x 2048",
            target=18_000, stretch_target=24_000),
    trained("llama_130m_bounded", "llama_130m", "llama 130M (4+1), 8 x 2048",
            target=180_000, stretch_target=240_000),
    trained("mamba2_1.3b_bounded", "mamba2_1.3b", "mamba2 1.3B (4+1), 4 x 2048",
            target=15_500, stretch_target=21_000),
    trained("mamba2_130m_bounded", "mamba2_130m", "mamba2 130M (4+1), 8 x 2048",
            target=110_000, stretch_target=160_000),
    *(
        trained(f"{model}_bounded", model, f"{text} (4+1), searches in 8-bit floats",
                target=target, stretch_target=stretch_target, search_dtype="float8_e4m3fn")
        for model, text, target, stretch_target in (
            ("llama_1.3b", "llama 1.3B", 27_500, 31_000), ("llama_130m", "llama 130M", 215_000, 240_000),
            ("mamba2_1.3b", "mamba2 1.3B", 20_500, 22_500), ("mamba2_130m", "mamba2 130M", 145_000, 160_000),
        )
    ),
    trained("llama_130m_free", "llama_130m", "llama 130M (32+4) at 13 iterations, 8 x 2048"),
    Figure("FLOP/s of the free phase relative to (4+1), llama 130M", "llama_130m",
           of_bounded("llama_130m"), "times", None, 0.9),
    trained("mamba2_130m_free", "mamba2_130m", "mamba2 130M (24+4) at 14 iterations, 8 x 2048"),
    Figure("FLOP/s of the free phase relative to (4+1), mamba2 130M", "mamba2_130m",
           of_bounded("mamba2_130m"), "times", None, 0.9),
    trained("state_tracking", "state_tracking", "state tracking, 512 x 256, at 18 iterations",
            target=3 * TRACKED, stretch_target=5 * TRACKED),
    decoded("decoding mamba2 1.3B, batch 1, h in float32", published=86.7, target=3, stretch_target=1.4,
            model="mamba2_1.3b", rows=1, state_types=FLOAT32),
    decoded("decoding llama 1.3B, batch 1", published=52.2, target=3, stretch_target=1.4,
            model="llama_1.3b", rows=1, state="bfloat16"),
    decoded("decoding mamba2 1.3B, 64 rows at context 512, h in float32", published=None,
            target=5, stretch_target=3, model="mamba2_1.3b", rows=64, state_types=FLOAT32),
    decoded("decoding mamba2 1.3B, 64 rows, h in bfloat16", published=None, target=5, stretch_target=3,
            model="mamba2_1.3b", rows=64, state_types=["bfloat16"]),
    decoded("decoding llama 1.3B, 64 rows at context 512, keys and values in bfloat16", published=None,
            target=5, stretch_target=3, model="llama_1.3b", rows=64, state="bfloat16"),
    decoded("decoding llama 1.3B, 64 rows, keys and values in 8 bits", published=None,
            target=5, stretch_target=3, model="llama_1.3b", rows=64, state="int8"),
    Figure("overhead of the search loop over the bare map, llama 130M, 8 x 2048", "driver",
           worst("overhead_sequence_percent", "overhead_prefix_percent", model="llama_130m"),
           "%", None, 2, None, False),
    Figure("overhead of the search loop over the bare map, mamba2 130M, 8 x 2048", "driver",
           worst("overhead_sequence_percent", "overhead_prefix_percent", model="mamba2_130m"),
           "%", None, 2, None, False),
    Figure("torch operators called by the search loop", "driver",
           worst("operator_calls_sequence", "operator_calls_prefix"), "per iteration", None, 20, None, False),
    *(
        Figure(f"distance of the logits from a tight solve, relative to the published stopping rule: {mode}",
               "agreement", farther(mode), "times", 1, 1.02, None, False)
        for mode in ("training", "evaluation")
    ),
    *(
        memory(f"memory {what}, {family} 1.3B (4+1), 4 x 2048", f"{family}_1.3b", key)
        for family in ("llama", "mamba2")
        for what, key in (("reserved, CUDA graphs included", "reserved_gb"),
                          ("allocated to tensors", "peak_gb"))
    ),
    *(
        Figure(f"memory reserved by the trainer, {family} 1.3B (free phase), 4 x 2048, step checkpointing",
               f"zoo_{family}_1.3b", of("reserved_gb", spec=f"{family}_1.3b", phase="free"),
               "GB", None, 75, None, False)
        for family in ("llama", "mamba2")
    ),
    Figure("graph breaks in the compiled maps, all training programs", TRAINING,
           worst("graph_breaks"), "breaks", None, 0, None, False),
    Figure("unintended device synchronizations per step, maximum over all training programs", TRAINING,
           worst("waits"), "synchronizations", None, 0, None, False),
]  # fmt: skip


def introduction(result: Row) -> str:
    """Return the date, hardware, versions and conditions of a run."""
    machine = result["machine"]
    known = ("torch", "cuda", "triton", "mamba_ssm", "causal_conv1d", "fla-core", "flash_attn", "xformers")
    versions = ", ".join(f"{name} {machine[name]}" for name in known if machine.get(name))
    return (
        f"`{result['command']}` on one {machine.get('gpu', 'CPU (tiny models, to test the program)')}, "
        f"{machine['date'][:10]}, Python {machine['python']}, {versions}. {quietness(result)}"
        "Training runs in bfloat16 autocast at the published number of iterations, with compiled layers and "
        "captured CUDA graphs. Percentages are the utilization: the share of the 770 TFLOP/s measured for "
        "matrix multiplication on an H100. Decoding runs in bfloat16 (published: float32) at a context of "
        "512 tokens. Figures in **bold** reach their target."
    )


def quietness(result: Row) -> str:
    """Return a sentence about other work on the GPU, or nothing if that was not checked."""
    programs = [program for program in result.get("programs", []) if "card" in program]
    if not programs:
        return ""
    disturbed = [program for program in programs if program.get("disturbed")]
    if disturbed:
        why = "; ".join(f"{program['program']}: {', '.join(program['disturbed'])}" for program in disturbed)
        return f"Other work DISTURBED the GPU ({why}). "
    speeds = [
        speed
        for program in programs
        for state in program["card"].values()
        if isinstance(state, dict) and (speed := state.get("copies_tb_s")) is not None
    ]
    if not speeds:
        return ""
    span = f"{min(speeds):.2f} to {max(speeds):.2f} TB/s"
    return f"The GPU was otherwise idle before and after each program (copy bandwidth {span}). "


def table(result: Row) -> str:
    """Return the table as Markdown."""
    lines = [
        "| work | unit | published | here | target | stretch target |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        here = shown(row["measured"])
        if row["measured"] is None:
            here = f"not measured: {row['not_measured']}"
        elif row["reached"] is not None:
            here = f"**{here}**" if row["reached"] else f"{here} (target missed)"
        if row.get("disturbed"):
            here += " (disturbed)"
        if share := row.get("share_of_card"):
            here += f", {100 * share:.0f} %"
        cells = [
            row["work"],
            row["unit"],
            shown(row["published"]),
            here,
            shown(row["target"]),
            shown(row["stretch_target"]),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def zoo_table(result: Row) -> str:
    """Return the table of the trainer's steps as Markdown, or nothing."""
    rows = [row for row in result.get("zoo", []) if "failed" not in row]
    if not rows:
        return ""
    lines = [
        "| spec and phase | batch | iterations | tokens/s | published, at iterations | GB allocated "
        "| GB reserved | published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        steps = ", step checkpointing" if row["checkpoint_activations"] == "steps" else ""
        published = shown(row["published_tokens_per_second"])
        if published:
            published += f", {row['published_iterations']}"
        cells = [
            f"`{row['spec']}` {row['phase']} ({row['searches']}){steps}",
            f"{row['rows']} \u00d7 {row['length']}",
            f"{row['iterations']:.1f}",
            shown(row["tokens_per_second"]),
            published,
            *(shown(row[key]) for key in ("allocated_gb", "reserved_gb", "published_gb")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


ZOO = (
    "Complete training steps of the zoo's specs in the same run (`benchmarks/gpu_zoo.py`: `python -m trainer "
    "--spec NAME training.compile_layers=true training.cuda_graphs=true`), at the tolerance of the spec. The "
    "data are random tokens, on which searches end early."
)


def shown(value: float | None) -> str:
    """Format a number: four digits, thousands separated by commas."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def cause(text: str) -> str:
    """Return the first sentence of an error, without the memory statistics that follow."""
    return re.sub(r"^exit code -?\d+: ", "", text).partition(". ")[0].rstrip(".")


def not_measured(result: Row) -> str:
    """Return the rows without a figure as Markdown, grouped by cause, or nothing."""
    causes: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["measured"] is None:
            causes.setdefault(cause(row["not_measured"]), []).append(row["work"])
    lines = [f"- `{why}`: {'; '.join(works)}" for why, works in causes.items()]
    return "\n".join(["Not measured in this run, by cause:", "", *lines]) if lines else ""


def quoted_tables(result: Row) -> str:
    """Return the text for docs/results.md: the measured rows, and the names of the others."""
    measured = [row for row in result["rows"] if row["measured"] is not None]
    parts = [introduction(result), table({**result, "rows": measured})]
    parts += [missing] if (missing := not_measured(result)) else []
    parts += [ZOO, zoo] if (zoo := zoo_table(result)) else []
    parts += [f"Note: {result['note']}."] if result.get("note") else []
    return "\n\n".join(parts) + "\n"


def quote(result: Row, text: str) -> str:
    """Return a text in which the tables between the two marks are replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + quoted_tables(result) + END + after
