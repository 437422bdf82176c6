"""The zoo: specs shipped with the package, one file per model; read by `implicit_blocks.load_spec(name)`."""
