"""Specs: what to build, as data. Importing them imports no torch.

The names are listed in ``__init__.pyi`` and imported on first use. The specs of components are defined beside
their code, in ``implicit_blocks.solvers``, ``gradients``, ``mixers`` and ``models``, which import this
package's modules.
"""

from implicit_blocks._utils.lazy import names_of_stub

__getattr__ = names_of_stub(__name__)
