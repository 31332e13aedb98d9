"""The simulator: real machines and real kernels on a virtual network and clock, with faults by seed."""
