"""Command lines: arguments and exit codes."""
