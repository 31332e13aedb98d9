"""Readable scripts for a simulated cluster; `script.py` says what they are made of."""
