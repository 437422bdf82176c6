"""The search for a fixed point: its options, its loop, and the policies of the loop."""
