"""Programs for simulated workers; each checks that nothing was lost, counted twice or mixed up."""
