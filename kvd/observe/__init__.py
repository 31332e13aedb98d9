"""What people and supervisors see of a process: its log and its messages to systemd."""
