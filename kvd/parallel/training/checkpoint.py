"""What `fit` saves: parameters, states and its progress, as one safetensors file.

The arrays are ``arg:NAME`` for parameters, ``aux:NAME`` for states, and ``state:NAME|…`` for the state of a local
update. The progress is in the metadata. The state of the servers' optimizer is in a second file, whose name has the
step in it and is given in the first: so one rename replaces both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from kvd.errors import NotAllowed
from kvd.files import read_file
from kvd.node.storage.atomic_file import write_atomically
from kvd.node.storage.tensor_file import parse_tensors
from kvd.parallel.batch import BFLOAT16
from kvd.parallel.device import HostArray

FORMAT = "kvd-checkpoint-1"


@dataclass
class Checkpoint:
    """The state of a training.

    Attributes:
        params, aux: by name, in the dtype of the model.
        epoch: the epoch to continue in, from 0.
        batch: how many of its batches are done.
        step: how many batches are done in all epochs.
        local_states: see `kvd.parallel.GradientPipeline.local_states`.
        server_states: the name of the file with the optimizer's state, in the same folder; empty if there is none.
    """

    params: Mapping[str, HostArray]
    aux: Mapping[str, HostArray]
    epoch: int = 0
    batch: int = 0
    step: int = 0
    local_states: Mapping[str, HostArray] = field(default_factory=dict)
    server_states: str = ""

    def write(self, path: Path, save_server_states: Callable[[Path], None] | None = None) -> None:
        """Write a new file and rename it, so that a crash leaves the old checkpoint or the new one.

        Arguments:
            save_server_states: writes the optimizer's state to a path.
        """
        if save_server_states is not None:
            self.server_states = f"{path.name}.{self.step}.states"
            save_server_states(path.with_name(self.server_states))
        write_atomically(path, lambda file: file.write(self.packed()), is_private=True)
        for other in path.parent.glob(f"{path.name}.*.states"):
            if other.name != self.server_states:
                other.unlink(missing_ok=True)

    def packed(self) -> bytes:
        """The content of the file."""
        tensors = {f"arg:{name}": array for name, array in self.params.items()}
        tensors |= {f"aux:{name}": array for name, array in self.aux.items()}
        tensors |= {f"state:{name}": array for name, array in self.local_states.items()}
        halves = [name for name, array in tensors.items() if array.dtype == BFLOAT16]
        metadata = {
            "format": FORMAT,
            "epoch": str(self.epoch),
            "batch": str(self.batch),
            "step": str(self.step),
            "server_states": self.server_states,
            "bfloat16": json.dumps(halves),  # their bits are kept as uint16
        }
        plain = {
            name: np.ascontiguousarray(array.view(np.uint16) if array.dtype == BFLOAT16 else array).reshape(array.shape)
            for name, array in tensors.items()
        }
        return save(plain, metadata)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read what `write` wrote. Nothing in the file is executed.

        Raises:
            NotAllowed: it is not such a file.
            OSError: it cannot be read.
        """
        try:
            return cls.unpacked(read_file(path))
        except NotAllowed as error:
            raise NotAllowed(f"{path}: {error}") from None

    @classmethod
    def unpacked(cls, data: bytes) -> Checkpoint:
        """The inverse of `packed`. Raises NotAllowed if ``data`` is something else."""
        try:
            tensors, metadata = parse_tensors(data, FORMAT)
            halves = set(json.loads(metadata["bfloat16"]))
            progress = {name: int(metadata[name]) for name in ("epoch", "batch", "step")}
            server_states = Path(metadata["server_states"]).name
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotAllowed(f"this is not a checkpoint of kvd: {error}") from None
        parts: dict[str, dict[str, HostArray]] = {"arg": {}, "aux": {}, "state": {}}
        for full, array in tensors.items():
            kind, _, name = full.partition(":")
            parts.setdefault(kind, {})[name] = array.view(BFLOAT16) if full in halves else array
        return cls(parts["arg"], parts["aux"], **progress, local_states=parts["state"], server_states=server_states)
