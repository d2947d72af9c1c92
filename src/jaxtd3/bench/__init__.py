"""`jaxtd3 bench` as everybody has it; what the documents need besides is in `benchmarks/`."""
