"""torch, imported in full before a test makes a cluster.

The first optimizer of a process imports 800 more modules: a second of CPU, in which other threads get little of the
interpreter. On a busy machine that took longer than a server in such a thread may be silent, and it counted as dead.
"""

from __future__ import annotations

import torch

torch.optim.SGD([torch.zeros(1)], lr=0.1)
