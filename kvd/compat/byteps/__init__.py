"""BytePS's names. Programs for torch import `kvd.compat.byteps.torch`."""
