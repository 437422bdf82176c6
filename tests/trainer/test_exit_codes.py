"""Exit codes: which errors are reported without a traceback, and that the documentation lists the codes."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch

from implicit_blocks.registry.contracts import ContractError
from trainer.cli import exit_codes
from trainer.cli.exit_codes import code_of, refuse, short_of_memory
from trainer.errors import DataError, LostPeerError, PeerError

TOO_MUCH = 2**60


def test_errors_have_the_documented_exit_codes() -> None:
    codes = {
        LostPeerError(step=3, reason="closed", kept=None): 1,
        PeerError("rank 1: the data of step 1 can't be used"): 2,
        DataError("token id 77 is outside the vocabulary"): 2,
        ContractError("acme.shift: rows mix"): 2,
        OSError(errno.ENOSPC, "No space left on device"): 4,
        OSError(errno.EROFS, "Read-only file system"): 4,
        OSError(errno.EFBIG, "File too large"): 4,
        OSError(errno.EACCES, "Permission denied"): None,
        ValueError("a mistake"): None,
        RuntimeError("a mistake"): None,
    }
    assert {error: code_of(error) for error in codes} == codes
    page = Path("docs/training.md").read_text()
    table = page[page.index("| exit code |") :].partition("\n\n")[0]
    named = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {int(number) for number in re.findall(r"\b\d+\b", table)} == {0, *named}


@pytest.mark.parametrize("made", [lambda: torch.empty(TOO_MUCH), lambda: bytearray(TOO_MUCH)])
def test_out_of_memory_on_the_host_is_not_a_bug(made) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        made()
    assert short_of_memory(caught.value) is not None
    assert code_of(caught.value) == 2


def test_a_refusal_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse("width is 0; choose at least 1") == 2
    assert capsys.readouterr() == ("", "error: width is 0; choose at least 1\n")
    assert refuse(OSError(errno.ENOSPC, "No space left on device")) == 2  # the system names no remedy
    assert capsys.readouterr().err.endswith("; free disk space, or choose another place by --output\n")
