"""What a group can bind: the protocols of a model, and models for NumPy and CuPy, torch and JAX."""
