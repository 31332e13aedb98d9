"""Payloads in shared memory: segments, leases on them, and what is offered to peers."""
