"""Training of the models that specs describe: ``python -m trainer --spec zoo/word_problem_s3.yaml``.

`trainer.run.build.build` builds a run from a spec and `Run.train` trains it. Importing this package, and the
specs of its sections, imports no torch.
"""
