"""CUDA graph capture, reusable buffers, and asynchronous copies to the host."""
