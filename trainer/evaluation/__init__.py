"""Benchmarks of language models: lm-eval tasks on local files, and the model adapter for lm-eval."""
