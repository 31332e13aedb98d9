"""Links: connections between two processes with frames, leases and payloads by reference."""
