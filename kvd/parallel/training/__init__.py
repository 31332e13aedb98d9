"""The training loop over a group and a store, its checkpoints and metrics, and the merging of worker updates."""
