"""ZeroMQ: the connections that every node has to every other one."""
