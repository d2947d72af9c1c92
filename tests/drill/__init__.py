"""The fault drill: runs are killed, starved, corrupted and poisoned, and must come to no harm.

`scripts/faults` runs it. A part is a function `part(drill) -> lines`, and a row in `PARTS`.
"""
