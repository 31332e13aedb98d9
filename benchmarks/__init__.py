"""kvd beside what it replaces, and beside what the machine can do: ``python -m benchmarks.compare``."""
