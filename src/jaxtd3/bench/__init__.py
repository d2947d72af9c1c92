"""Speed against the machine's limits: what users run. Peers and races are in `benchmarks/`."""
