"""kvd compared with the systems that it replaces and with the limits of the machine."""
