"""What other ecosystems' checkpoints need to become ours."""
