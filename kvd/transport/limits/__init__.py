"""Limits on peers: how many may connect, how often, and how much memory their messages take."""
