"""The store of a cluster: calls become requests of the worker machine, which an engine runs in its own thread."""
