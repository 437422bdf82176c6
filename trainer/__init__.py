"""Train a model that a spec describes: `python -m trainer --spec zoo/word_problem_s3.yaml`.

`trainer.run.build.build` makes a run from a spec, `Run.train` carries it out. Importing this package, and the
specs of its sections, imports no torch.
"""
