"""Physics back ends: see `contract.py`."""
