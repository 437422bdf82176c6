"""Implicit and explicit models at equal text and equal executed FLOPs, each side tuned over the same grid."""
