"""The zoo: specs shipped with the package, one model a file; `implicit_blocks.load_spec(name)` reads them."""
