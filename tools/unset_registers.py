"""Find instructions of compiled GPU kernels that read a uniform register before any instruction wrote it.

    python tools/unset_registers.py FOLDER     # all .cubin files below it, such as Triton's cache

The assembler ptxas 12.8 compiles some kernels in this way for Hopper: the address of a matrix product's
operand is then arbitrary, and the kernel reads outside of its shared memory. Instructions are read in the
order of the text, without jumps. Exits with 1 if there are any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

INSTRUCTION = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<rest>[^;]*);"
)
READ = re.compile(r"(?P<of>\bg?desc\[)?\bUR(?P<number>\d+)\b(?P<tail>(?:\.64)?)")
WRITES = ("U", "S2UR", "R2UR", "CS2UR", "VOTEU", "REDUX", "LDCU")  # beginnings of names


def unset_registers(assembly: str) -> list[str]:
    """Return the instructions of a disassembled kernel that read uniform registers not yet written."""
    written: set[int] = set()
    found = []
    for line in assembly.splitlines():
        if line.lstrip().startswith(".section"):
            written = set()  # another kernel
        if (match := INSTRUCTION.match(line)) is None:
            continue
        name, operands = match["name"], [part.strip() for part in match["rest"].split(",")]
        target = _target(name, operands)
        read: set[int] = set()
        for operand in operands if target is None else operands[:target] + operands[target + 1 :]:
            read |= _read(name, operand, operands)
        if read - written:
            found.append(f"{match['address']} {name} {match['rest'].strip()}")
            written |= read  # reported once
        if target is not None:
            first = int(operands[target][2:])
            written |= set(range(first, first + _width(name)))
    return found


def disassembled(cubin: Path) -> str:
    """Return the instructions of a compiled kernel, by the disassembler in Triton's package."""
    done = subprocess.run(
        [str(_disassembler()), "-c", str(cubin)], capture_output=True, text=True, check=True
    )
    return done.stdout


def _disassembler() -> Path:
    package = find_spec("triton")
    if package is None or package.origin is None:
        raise SystemExit("the disassembler is part of triton, which is not installed")
    return Path(package.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def _target(name: str, operands: list[str]) -> int | None:
    """Return the operand that is written, after predicates; None where it is no uniform register."""
    if not name.startswith(WRITES) or "SETP" in name:
        return None
    for place, operand in enumerate(operands):
        if not re.fullmatch(r"U?P(\d|T)", operand):
            return place if re.fullmatch(r"UR\d+", operand) else None
    return None


def _width(name: str) -> int:
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1


def _read(name: str, operand: str, operands: list[str]) -> set[int]:
    numbers: set[int] = set()
    for match in READ.finditer(operand):
        first, width = int(match["number"]), 2 if match["tail"] or name == "UIADD3.64" else 1
        if (
            match["of"] == "gdesc["
        ):  # of both factors; with the first one in registers only the second is read
            in_registers = not operands[1].startswith("gdesc")
            first, width = (first + 2, 2) if in_registers else (first, 4)
        elif match["of"] == "desc[":
            width = 2
        numbers |= set(range(first, first + width))
    return numbers


def main() -> int:
    """Print the instructions of every kernel in a folder."""
    files = sorted(Path(sys.argv[1]).rglob("*.cubin"))
    bad = 0
    for file in files:
        for instruction in unset_registers(disassembled(file)):
            bad += 1
            print(f"{file}: {instruction}")
    print(f"{len(files)} kernels, {bad} instructions that read registers never written")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
