"""Moves messages between nodes, without knowing what they mean."""
