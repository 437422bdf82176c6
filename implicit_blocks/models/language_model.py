"""The type of the library's language models, for code that accepts either."""

from __future__ import annotations

from implicit_blocks.models.explicit import ExplicitLM
from implicit_blocks.models.implicit import ImplicitLM

LanguageModel = ImplicitLM | ExplicitLM
