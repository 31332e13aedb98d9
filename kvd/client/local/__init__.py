"""The store without a cluster: types `local` and `device`, with the arithmetic of the servers."""
