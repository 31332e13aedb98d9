"""Horovod's names. Programs for torch import `kvd.compat.horovod.torch`."""
