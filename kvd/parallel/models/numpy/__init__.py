"""Networks of layers that compute with NumPy or CuPy."""
