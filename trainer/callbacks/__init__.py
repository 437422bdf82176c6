"""Callbacks: what else happens while a run trains."""

from trainer.callbacks.base import Callback, CallbackContext
from trainer.callbacks.calling import Callbacks

__all__ = ["Callback", "CallbackContext", "Callbacks"]
