"""The shell: it gives the machines a clock, sockets, memory, threads and processes."""
