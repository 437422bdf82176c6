"""The trainer's sections of a run spec; `trainer.spec` puts them together. Imports no torch."""
