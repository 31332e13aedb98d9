"""A cluster in virtual time: the real machines on processors, memories and networks that are only calculated."""
