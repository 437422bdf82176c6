"""The trainer's sections of a run spec; `trainer.specs.run` puts them together. Imports no torch."""
