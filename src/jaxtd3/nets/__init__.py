"""Actor and critics as flax.linen modules."""
