"""What each experiment is asked on the command line, a module each; none imports torch before it is run."""
