"""Settings: sections, the whole config, presets. No JAX here."""
