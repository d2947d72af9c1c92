"""What the figures of the documents are made with: run from a checkout, not in the wheel.

`jaxtd3 bench` finds the modes that stand here (peers, scaling, roofline, ...) by their `command`.
"""
