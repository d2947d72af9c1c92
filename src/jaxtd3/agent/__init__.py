"""The learner: FastTD3, its critics, optimiser, normalisation and exploration noise."""
