"""The server: it leads slices, merges what workers push, and serves what is committed."""
