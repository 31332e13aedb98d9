"""The store as programs see it: `store` (blocking), `aio` (async), `local` (no cluster), `admin` (looking in)."""
