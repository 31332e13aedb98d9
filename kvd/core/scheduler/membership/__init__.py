"""Membership of a run: ranks, liveness, participation in rounds, and the views that announce it."""
