"""Code shared by the experiments: options, checks, errors, runs, searches."""
