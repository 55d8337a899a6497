"""A machine: what its own tools tell of it, and its entry in a cluster file."""
