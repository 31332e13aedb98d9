"""The store as programs see it. Imports go down: `facades` → `local` and `cluster` → `calls`."""
