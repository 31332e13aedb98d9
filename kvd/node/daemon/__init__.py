"""Daemons: the scheduler and the servers as processes."""
