"""Modules with the names of other frameworks, for programs that were written for these."""
