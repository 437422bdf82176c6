"""What computed a run's operators: said once each, and kept in its manifest."""

from __future__ import annotations

from implicit_blocks.ops import backends
from trainer.errors import RunFolderError
from trainer.reporting.display import Display
from trainer.storage.run_folder import RunFolder


class BackendRecord:
    """Watches for backends that have not run before.

    Args:
        folder: whose manifest names them; None: no manifest, on processes that don't write.
        display: where a line is said.

    """

    def __init__(self, folder: RunFolder | None, display: Display) -> None:
        self._folder = folder
        self._display = display
        self._known: tuple[tuple[str, str], ...] = ()

    def update(self) -> None:
        """Say and record what is new; costs nothing where nothing is."""
        ran = backends.chosen()
        if ran == self._known:
            return
        new = [f"{operation} by {backend}" for operation, backend in ran[len(self._known) :]]
        self._known = ran
        if self._folder is not None:
            self._display.log(f"computed: {', '.join(new)}")
            try:
                self._folder.record_backends(backends.report())
            except (OSError, RunFolderError) as error:  # nothing depends on it
                self._display.log(f"WARNING: the backends can't be noted in the manifest ({error})")
