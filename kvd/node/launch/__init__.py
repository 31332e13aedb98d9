"""A whole job on this machine or several: a scheduler, servers and workers, started, watched and ended together.

`launcher` is the entrance; `supervisor` tells the story of a run; `plan` says what each process is started with.
"""

from kvd.node.launch.hosts import Host, parse_hosts
from kvd.node.launch.job import Job
from kvd.node.launch.launcher import Launch, run
from kvd.node.launch.output import Sink, Stream
from kvd.node.launch.restart_policy import RestartRule

__all__ = ["Host", "Job", "Launch", "RestartRule", "Sink", "Stream", "parse_hosts", "run"]
