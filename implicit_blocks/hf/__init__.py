"""The models as Hugging Face transformers classes, and conversion of other checkpoints.

Importing this package registers the classes with ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``
if transformers is installed; ``register()`` registers them explicitly. The modules that read and write
checkpoints do not need transformers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from implicit_blocks._utils.own_parts import install_extra

if TYPE_CHECKING:
    from implicit_blocks.hf.cache import ImplicitCache
    from implicit_blocks.hf.configuration import ImplicitLlamaConfig, ImplicitMamba2Config
    from implicit_blocks.hf.folders import from_library, to_library
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
    "ImplicitLlamaModel": "modeling",
    "ImplicitMamba2Config": "configuration",
    "ImplicitMamba2ForCausalLM": "modeling",
    "ImplicitMamba2Model": "modeling",
    "from_library": "folders",
    "to_library": "folders",
}

__all__ = [
    "ImplicitCache",
    "ImplicitLlamaConfig",
    "ImplicitLlamaForCausalLM",
    "ImplicitLlamaModel",
    "ImplicitMamba2Config",
    "ImplicitMamba2ForCausalLM",
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
            f"{what} needs transformers 5.17 or newer; {install_extra('hf')}",
            name="transformers",
        )


def register() -> None:
    """Register configurations and models with the Auto classes; further calls have no effect.

    Raises:
        ImportError: transformers is not installed; the message gives the installation command.

    """
    require_transformers()
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from implicit_blocks.hf import modeling

    for base, causal in (
        (modeling.ImplicitLlamaModel, modeling.ImplicitLlamaForCausalLM),
        (modeling.ImplicitMamba2Model, modeling.ImplicitMamba2ForCausalLM),
    ):
        config = base.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForCausalLM.register(config, causal, exist_ok=True)


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
