"""Output of a process for people and supervisors: its log and its messages to systemd."""
