"""Which gradients a group computes: MXNet's rules for ``grad_req``, ``fixed_param_names`` and ``inputs_need_grad``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.errors import ConfigError
from kvd.parallel.models.model import GradReq


@dataclass(frozen=True)
class RequestRules:
    """How the requests of a group follow from its arguments.

    Without ``for_training`` everything is ``"null"``. Otherwise, for ``grad_req`` as

    - a string: it applies to each parameter that is not fixed, and to the data if ``inputs_need_grad``;
    - a mapping: as for ``"write"``, then the mapping overrides by name, even for fixed parameters;
    - a list: one request per name of ``arg_names`` (data, parameters, labels), used as they are.

    Labels are always ``"null"``.
    """

    grad_req: GradReq | Sequence[GradReq] | Mapping[str, GradReq]
    fixed_param_names: tuple[str, ...]
    inputs_need_grad: bool
    for_training: bool

    def resolve(self, data: Sequence[str], params: Sequence[str], labels: Sequence[str]) -> dict[str, GradReq]:
        """Name → request for every parameter and data input. Whether the requests exist is checked when they are bound.

        Raises:
            ConfigError: a list of the wrong length, a request for a label, or a fixed parameter that does not exist.
        """
        unknown = [name for name in self.fixed_param_names if name not in params]
        if unknown:
            raise ConfigError(
                f"fixed_param_names has {', '.join(unknown)}, not a parameter of the model; it has {', '.join(params)}",
                setting="fixed_param_names",
            )
        if not self.for_training:
            return dict.fromkeys([*params, *data], "null")
        if isinstance(self.grad_req, str):
            return self._defaults(self.grad_req, data, params)
        if isinstance(self.grad_req, Mapping):
            named = dict(self.grad_req)
            requests = self._defaults("write", data, params)
        else:
            names = [*data, *params, *labels]
            if len(self.grad_req) != len(names):
                raise ConfigError(
                    f"grad_req lists {len(self.grad_req)} requests for {len(names)} arguments: {', '.join(names)}",
                    setting="grad_req",
                )
            named = dict(zip(names, self.grad_req, strict=True))
            requests = {}
        for name in labels:
            if named.pop(name, "null") != "null":
                raise ConfigError(f'{name} is a label: its grad_req can only be "null"', setting="grad_req")
        return requests | named

    def _defaults(self, request: GradReq, data: Sequence[str], params: Sequence[str]) -> dict[str, GradReq]:
        requests: dict[str, GradReq] = {name: "null" if name in self.fixed_param_names else request for name in params}
        return requests | dict.fromkeys(data, request if self.inputs_need_grad else "null")
