"""Keys of nodes: their files, and what each of them allows."""
