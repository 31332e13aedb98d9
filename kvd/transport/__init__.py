"""How it moves: frames between nodes, and nothing about what they mean."""
