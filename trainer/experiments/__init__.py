"""The experiments of the paper, one package each, with their command line."""
