"""The record of the backends that computed a run's operators: one line each, and a note in the manifest."""

from __future__ import annotations

from implicit_blocks.ops import backends
from implicit_blocks.ops.accelerated import how_to_get
from trainer.errors import RunFolderError
from trainer.reporting.display import Display
from trainer.storage.run_folder import RunFolder


class BackendRecord:
    """Reports backends that have not run before in this process.

    Args:
        folder: of the run, whose manifest names the backends; None on processes that do not write.
        display: shows a line for new backends.

    """

    def __init__(self, folder: RunFolder | None, display: Display) -> None:
        self._folder = folder
        self._display = display
        self._known: tuple[tuple[str, str], ...] = ()

    def update(self) -> None:
        """Report the backends that have run since the last call."""
        ran = backends.chosen()
        if ran == self._known:
            return
        new = ran[len(self._known) :]
        self._known = ran
        if self._folder is not None:
            self._display.log(f"backends: {', '.join(f'{name} by {backend}' for name, backend in new)}")
            for name, backend in new:
                if package := backends.missing_package(name, backend):
                    self._display.log(f"{package} would compute {name} faster here; {how_to_get(package)}")
            try:
                self._folder.record_backends(backends.report())
            except (OSError, RunFolderError) as error:  # the run does not depend on the record
                self._display.log(f"WARNING: the backends can't be recorded in the manifest ({error})")
