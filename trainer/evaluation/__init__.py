"""Benchmarks of language models: tasks of lm-eval on local files, and the model as lm-eval asks it."""
