"""What is decided: the scheduler, the server and the worker as deterministic state machines.

Nothing in this package knows a clock, a socket, a thread, chance or an array: time is an argument, values are opaque
handles with ranges, and whatever takes time is an effect whose result comes back as an event.
"""
