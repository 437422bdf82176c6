"""The models as Hugging Face transformers classes, and conversion of other pretrained folders.

Importing this package registers the classes with ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM``,
``AutoModelForSequenceClassification`` and ``AutoModelForTokenClassification`` if transformers is installed;
``register()`` registers them explicitly. The modules that read and write checkpoints do not need
transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.hf.remote_code import AUTO_CLASSES

if TYPE_CHECKING:
    from implicit_blocks.hf.cache import ImplicitCache
    from implicit_blocks.hf.configuration import ImplicitLlamaConfig, ImplicitMamba2Config
    from implicit_blocks.hf.folders import from_library, to_library
    from implicit_blocks.hf.heads import (
        ImplicitLlamaForSequenceClassification,
        ImplicitLlamaForTokenClassification,
        ImplicitMamba2ForSequenceClassification,
        ImplicitMamba2ForTokenClassification,
    )
    from implicit_blocks.hf.modeling import (
        ImplicitLlamaForCausalLM,
        ImplicitLlamaModel,
        ImplicitMamba2ForCausalLM,
        ImplicitMamba2Model,
    )

_HOME_OF = {
    "ImplicitCache": "cache",
    "ImplicitLlamaConfig": "configuration",
    "ImplicitLlamaForCausalLM": "modeling",
    "ImplicitLlamaForSequenceClassification": "heads",
    "ImplicitLlamaForTokenClassification": "heads",
    "ImplicitLlamaModel": "modeling",
    "ImplicitMamba2Config": "configuration",
    "ImplicitMamba2ForCausalLM": "modeling",
    "ImplicitMamba2ForSequenceClassification": "heads",
    "ImplicitMamba2ForTokenClassification": "heads",
    "ImplicitMamba2Model": "modeling",
    "from_library": "folders",
    "to_library": "folders",
}

__all__ = [
    "ImplicitCache",
    "ImplicitLlamaConfig",
    "ImplicitLlamaForCausalLM",
    "ImplicitLlamaForSequenceClassification",
    "ImplicitLlamaForTokenClassification",
    "ImplicitLlamaModel",
    "ImplicitMamba2Config",
    "ImplicitMamba2ForCausalLM",
    "ImplicitMamba2ForSequenceClassification",
    "ImplicitMamba2ForTokenClassification",
    "ImplicitMamba2Model",
    "from_library",
    "register",
    "require_transformers",
    "to_library",
]


def require_transformers(what: str = "implicit_blocks.hf") -> None:
    """Raise an error if transformers is not installed.

    Args:
        what: the feature that needs transformers; the message names it.

    Raises:
        ImportError: transformers is not installed; the message gives the installation command.

    """
    if find_spec("transformers") is None:
        raise ImportError(
            f"{what} needs transformers 5.17 or newer; {install_extra('hf')}", name="transformers"
        )


def register() -> None:
    """Register configurations and models with the Auto classes; further calls have no effect.

    Raises:
        ImportError: transformers is not installed; the message gives the installation command.

    """
    require_transformers()
    import transformers

    from implicit_blocks.hf import heads, modeling

    classes = []
    for stem in ("ImplicitLlama", "ImplicitMamba2"):
        config = getattr(modeling, f"{stem}Model").config_class
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_class, suffix in AUTO_CLASSES.items():
            model_class = getattr(heads if suffix.endswith("Classification") else modeling, f"{stem}{suffix}")
            getattr(transformers, auto_class).register(config, model_class, exist_ok=True)
            classes.append(model_class)
    for package in _loaded_packages():
        for model_class in classes:
            setattr(package, model_class.__name__, model_class)  # where `transformers serve` looks a class up


def _loaded_packages() -> list[Any]:
    """Return the package transformers as each of its modules knows it.

    ``transformers.processing_utils`` loads the package a second time; modules imported before keep the first.
    """
    own = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    known = [getattr(module, "__dict__", {}).get("transformers") for module in own]
    found = {id(package): package for package in (sys.modules["transformers"], *known) if package is not None}
    return list(found.values())


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'implicit_blocks.hf' has no attribute {name!r}")
    register()
    value = getattr(import_module(f"implicit_blocks.hf.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if find_spec("transformers") is not None:
    register()
