"""Real data small enough to ship: what the demo and the tests train on."""
