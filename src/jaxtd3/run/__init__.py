"""A run on the host: the program, the session, checkpoints, evaluation."""
