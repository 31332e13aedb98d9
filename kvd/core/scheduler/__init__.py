"""The scheduler: membership, deaths, and barriers."""
