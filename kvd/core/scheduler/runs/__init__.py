"""Runs of jobs: the table of them, their phases, and the record that a restarted scheduler reads."""
