"""The shell of a node: it feeds a machine with events, and carries its effects out."""
