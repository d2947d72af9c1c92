"""Collecting and learning as one pure function; many runs as one program."""
