"""Callbacks: actions at the events of a training run."""

from trainer.callbacks.base import Callback, CallbackContext
from trainer.callbacks.dispatch import CallbackDispatcher, Callbacks

__all__ = ["Callback", "CallbackContext", "CallbackDispatcher", "Callbacks"]
