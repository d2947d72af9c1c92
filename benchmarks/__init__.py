"""Peers, races and the suite of the docs: run from a checkout, not in the wheel."""
