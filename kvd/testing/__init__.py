"""Clusters on loopback and slow links, for tests of programs that use kvd."""
