"""Theorem 1 and Figure 7: the Jacobian between consecutive states."""
