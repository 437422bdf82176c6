"""Models of other libraries, trained by the same loop."""
