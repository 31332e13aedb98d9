"""Why an address cannot be listened on."""

from __future__ import annotations

import errno
import socket as unix

import zmq


def why_not_listening(error: zmq.ZMQError) -> str:
    """Why an address cannot be listened on, and what to do."""
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):  # ENODEV: a name or an interface is unknown
        return (
            "this machine has no such address; use one that it has (`ip address` lists them), or tcp://0.0.0.0:PORT "
            "for all of them"
        )
    reason = error.strerror
    if error.errno == errno.EADDRINUSE:
        return f"{reason}; stop what listens there, or choose another address (port 0 takes any free port)"
    if error.errno == errno.EACCES:
        return f"{reason}; choose another address: ports below 1024 need root, and a path needs a folder of this user"
    return f"{reason}; choose another address"


def someone_listens(path: str) -> bool:
    """Whether a process accepts connections at this path. A path that a dead process left behind is free."""
    if path.startswith("@"):
        return False  # an abstract name: the kernel refuses to bind it twice
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
