"""Word problems: Figures 1 and 3."""
