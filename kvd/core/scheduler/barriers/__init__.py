"""Barriers and points, the reports of waits, and the proof of a deadlock."""
