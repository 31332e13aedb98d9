"""Jobs of a server: updates, the states of optimizers, parts of tables, and commands."""
