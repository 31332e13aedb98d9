"""torch's optimizers as those of kvd that take the same steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvd.errors import ConfigError, NotAllowed
from kvd.optimizer import SGD, AdaDelta, Adagrad, Adam, Adamax, AdamW, Nadam, Optimizer, RMSProp
from kvd.optimizer.fields import kinds
from kvd.optimizer.multipliers import MAX_MULTIPLIERS, MAX_NAMES_BYTES, Multipliers

Group = Mapping[str, Any]

REMEDY = 'where="workers" takes any torch optimizer'
_SPEED_ONLY = frozenset({"foreach", "fused", "capturable"})
_BY_GROUP = frozenset({"lr", "weight_decay"})
_SAME_FACTOR = 1e-12


@dataclass(frozen=True)
class _Rule:
    """The counterpart of one of torch's optimizers.

    Attributes:
        kind: the optimizer of kvd with the same formula.
        fields: argument of torch → field of kvd.
        fixed: argument of torch → the value for which the formulas agree; False for those that are not listed.
    """

    kind: type[Optimizer]
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def values(self, group: Group) -> dict[str, Any]:
        """Return the fields of kvd for one of torch's groups, with `learning_rate` and `wd`."""
        found: dict[str, Any] = {"learning_rate": _plain(group["lr"]), "wd": _plain(group["weight_decay"])}
        if group.get("maximize"):
            found["rescale_grad"] = -1.0  # torch negates the gradient before it adds the decay: so does this
        for argument, name in self.fields.items():
            found[name] = _plain(group[argument])
        if "betas" in group:
            found["beta1"], found["beta2"] = map(_plain, group["betas"])
        return found

    def takes(self, argument: str, value: Any, group: Group) -> bool:
        """Whether the formulas agree for this value of an argument of torch."""
        if argument in _BY_GROUP or argument in self.fields or argument in ("betas", "maximize"):
            return True
        if argument == "dampening" and not group["momentum"]:
            return True  # it does nothing then
        return bool(value == self.fixed.get(argument, False))  # False: also for what a later torch adds


_EPSILON = {"eps": "epsilon"}
_RULES: dict[type[torch.optim.Optimizer], _Rule] = {
    torch.optim.SGD: _Rule(SGD, {"momentum": "momentum", "nesterov": "nesterov"}),
    torch.optim.Adam: _Rule(Adam, _EPSILON),
    torch.optim.AdamW: _Rule(AdamW, _EPSILON, {"decoupled_weight_decay": True}),
    torch.optim.Adagrad: _Rule(Adagrad, {**_EPSILON, "lr_decay": "lr_decay"}),
    torch.optim.RMSprop: _Rule(RMSProp, {**_EPSILON, "alpha": "alpha", "momentum": "momentum", "centered": "centered"}),
    torch.optim.Adadelta: _Rule(AdaDelta, {**_EPSILON, "rho": "rho"}),
    torch.optim.Adamax: _Rule(Adamax, _EPSILON),
    torch.optim.NAdam: _Rule(Nadam, {**_EPSILON, "momentum_decay": "momentum_decay"}),
}


def from_torch(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
) -> Optimizer:
    """Return the optimizer of `kvd.optimizer` that takes the same steps, for ``kv.set_optimizer``.

    ::

        torch.optim     kvd.optimizer   refused
        SGD             SGD             dampening with momentum
        Adam, AdamW     Adam, AdamW     amsgrad
        Adagrad         Adagrad         initial_accumulator_value
        RMSprop         RMSProp
        Adadelta        AdaDelta        eps=0
        Adamax          Adamax
        NAdam           Nadam           decoupled_weight_decay

    ``maximize`` becomes ``rescale_grad=-1``. ``foreach``, ``fused`` and ``capturable`` are ignored: they change the
    speed, not the numbers. Groups may differ in ``lr`` and ``weight_decay``; their differences become ``lr_mult`` and
    ``wd_mult``. If there are too many names for these, they become patterns, such as ``"*.bias"``, that fit no
    parameter of another group.

    Args:
        optimizer: one of the table, before its first step. Its parameters are not read.
        named_parameters: as ``module.named_parameters()``; the names are those of the keys. Needed if groups differ,
            unless the optimizer was made with names (torch 2.6).

    Raises:
        NotAllowed: no optimizer of kvd takes the same steps, or this one has made steps. The message names the argument
            and its value.
    """
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise NotAllowed(
            f"this {type(optimizer).__name__} has made steps, and the servers would begin without its state: pass "
            f"a new one, or use another mode: {REMEDY}"
        )
    return Hyperparameters(optimizer, named_parameters).optimizer


class Hyperparameters:
    """The hyperparameters of a torch optimizer as fields of its counterpart, and their changes.

    A learning rate scheduler changes ``optimizer.param_groups``; `changed` is what to send to the servers for that.

    Args:
        optimizer, named_parameters: see `from_torch`.

    Raises:
        NotAllowed: no optimizer of kvd takes the same steps.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> None:
        self._torch = optimizer
        self._rule = _rule_of(optimizer)
        self._arguments = [name for name in optimizer.defaults if name not in _SPEED_ONLY]
        self._names = _GroupNames(optimizer, named_parameters)
        self._rates = _Factors("lr", self._names)
        self._decays = _Factors("weight_decay", self._names)
        self._seen = self._read()
        self._optimizer = self._mapped()

    @property
    def optimizer(self) -> Optimizer:
        """The counterpart, with the values of the last call of `changed`."""
        return self._optimizer

    def changed(self) -> dict[str, Any]:
        """Return the fields that have changed since the last call, for ``kv.update_optimizer(**changed)``.

        The first call compares with the values at construction. Usually the result is empty or has one entry,
        `learning_rate`. If nothing has changed, a call takes some microseconds.

        Raises:
            NotAllowed: the values have no counterpart any more. The next call compares with the same values as this.
        """
        seen = self._read()
        if seen == self._seen:
            return {}
        before, now = self._optimizer, self._mapped()
        self._seen, self._optimizer = seen, now
        return changes_between(before, now)

    def _read(self) -> list[list[Any]]:
        """The values of all groups, to be compared: a tensor may be changed in place."""
        return [
            [_plain(value) if isinstance(value := group[name], torch.Tensor) else value for name in self._arguments]
            for group in self._torch.param_groups
        ]

    def _mapped(self) -> Optimizer:
        groups = self._torch.param_groups
        for index, group in enumerate(groups):
            self._check(index, group)
        found = [self._rule.values(group) for group in groups]
        rate, lr_mult = self._rates.of([values["learning_rate"] for values in found])
        decay, wd_mult = self._decays.of([values["wd"] for values in found])
        try:
            return self._rule.kind(
                **{**found[0], "learning_rate": rate, "wd": decay, "lr_mult": lr_mult, "wd_mult": wd_mult}
            )
        except ConfigError as error:
            name = type(self._torch).__name__
            raise NotAllowed(f"{name} has no counterpart on the servers: {error}; {REMEDY}") from error

    def _check(self, index: int, group: Group) -> None:
        """Raise NotAllowed if an argument has a value that the servers cannot calculate with."""
        first = self._torch.param_groups[0]
        for argument in self._arguments:
            value = group[argument]
            if not self._rule.takes(argument, value, group):
                raise NotAllowed(
                    f"{type(self._torch).__name__}({argument}={value!r}) has no counterpart on the servers "
                    f"(param_groups[{index}]): leave {argument} out, or use another mode: {REMEDY}"
                )
            if argument not in _BY_GROUP and value != first[argument]:
                raise NotAllowed(
                    f"param_groups[{index}] has {argument}={value!r}, and param_groups[0] has {first[argument]!r}: on "
                    f"the servers groups differ in lr and weight_decay only; {REMEDY}"
                )


def changes_between(before: Optimizer | None, now: Optimizer) -> dict[str, Any]:
    """Return the fields in which two optimizers of one class differ, as they are now, for ``kv.update_optimizer``.

    Args:
        before: None: all fields are returned.
    """
    values = {name: getattr(now, name) for name in kinds(type(now))}
    changes = {name: value for name, value in values.items() if before is None or value != getattr(before, name)}
    return {name: dict(value) if isinstance(value, Multipliers) else value for name, value in changes.items()}


def _rule_of(optimizer: torch.optim.Optimizer) -> _Rule:
    # By the very type: a class derived from one of torch's may calculate anything.
    kind = type(optimizer)
    rule = _RULES.get(kind)
    if rule is None:
        known = ", ".join(known.__name__ for known in _RULES)
        raise NotAllowed(
            f"the servers have no optimizer with the steps of {kind.__module__}.{kind.__qualname__}; of torch's "
            f"they have {known}; {REMEDY}"
        )
    if kind is torch.optim.Adam and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
        return _RULES[torch.optim.AdamW]
    return rule


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a step has left something in the state of a parameter. Adagrad makes its state before the first one."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(value is not None for value in state.values())


def _plain(value: Any) -> Any:
    """A number of torch's as Python's."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return value if isinstance(value, bool) else float(value)


# ── groups ──


class _GroupNames:
    """The names of the parameters of each group. They are looked up when groups differ."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    ) -> None:
        self._torch = optimizer
        self._given = None if named_parameters is None else {id(tensor): name for name, tensor in named_parameters}

    def sizes(self) -> list[int]:
        """How many parameters each group has."""
        return [len(group["params"]) for group in self._torch.param_groups]

    def of(self, index: int) -> list[str]:
        """The names of one group.

        Raises:
            NotAllowed: a parameter has none.
        """
        group = self._torch.param_groups[index]
        if self._given is None and "param_names" in group:
            return list(group["param_names"])
        if self._given is None:
            raise NotAllowed(
                f"param_groups[{index}] has another lr or weight_decay than other groups, which servers tell apart "
                "by the names of parameters: pass named_parameters=module.named_parameters()"
            )
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in self._given:
                raise NotAllowed(
                    f"parameter {position} of param_groups[{index}], of shape {tuple(parameter.shape)}, is not in "
                    "named_parameters: pass those of the whole module"
                )
        return [self._given[id(parameter)] for parameter in group["params"]]


class _Factors:
    """One hyperparameter of all groups as a base value and factors by name.

    The base is the value of the group with most parameters, and stays with that group as long as its value is positive.
    So a scheduler that multiplies all groups by one number changes the base alone.
    """

    def __init__(self, argument: str, names: _GroupNames) -> None:
        self._argument = argument
        self._names = names
        self._base: int | None = None
        self._factors: list[float] = []
        self._entries: Mapping[str, float] = {}

    def of(self, values: Sequence[float]) -> tuple[float, Mapping[str, float]]:
        """Return the base and the factors for the value of each group."""
        factors = self._factors_of(values)
        if factors != self._factors:
            self._entries = self._named(factors)
            self._factors = factors
        return values[self._base or 0], self._entries

    def _factors_of(self, values: Sequence[float]) -> list[float]:
        if len(values) == 1:
            self._base = 0
            return [1.0]
        if not any(values):
            return self._factors if len(self._factors) == len(values) else [1.0] * len(values)
        if self._base is None or not values[self._base]:
            sizes = self._names.sizes()
            self._base = max((index for index, value in enumerate(values) if value), key=lambda index: sizes[index])
        base = values[self._base]
        found = [value / base for value in values]
        if len(self._factors) != len(found):
            return found
        # The same factor but for the rounding of a scheduler stays the same.
        return [
            before if math.isclose(base * before, value, rel_tol=_SAME_FACTOR, abs_tol=0.0) else new
            for before, new, value in zip(self._factors, found, values, strict=True)
        ]

    def _named(self, factors: Sequence[float]) -> Mapping[str, float]:
        if all(factor == 1.0 for factor in factors):
            return {}
        by_name = {name: factor for index, factor in enumerate(factors) for name in self._names.of(index)}
        entries = {name: factor for name, factor in by_name.items() if factor != 1.0}
        if not _fit(entries):
            entries = _patterns(by_name)
        if not _fit(entries):
            raise NotAllowed(
                f"the groups with another {self._argument} have {len(entries)} parameters, and their names have too "
                f"little in common for {MAX_MULTIPLIERS} patterns with {MAX_NAMES_BYTES} bytes in all; {REMEDY}"
            )
        return entries


def _fit(entries: Mapping[str, float]) -> bool:
    return len(entries) <= MAX_MULTIPLIERS and Multipliers(entries).names_nbytes <= MAX_NAMES_BYTES


def _patterns(factors: Mapping[str, float]) -> dict[str, float]:
    """Return few names and patterns that give each of these names its factor, found greedily.

    A pattern is used if all names that it fits have one factor, so their order does not matter.
    """
    left = {name for name, factor in factors.items() if factor != 1.0}
    fitting: dict[str, set[str]] = {}
    for pattern in sorted({pattern for name in left for pattern in _candidates(name)}):
        fits = Multipliers({pattern: 2.0})
        names = {name for name in factors if fits.of(name) == 2.0}
        if len({factors[name] for name in names}) == 1:
            fitting[pattern] = names
    entries: dict[str, float] = {}
    while left:
        best = max(fitting, key=lambda pattern: len(fitting[pattern] & left), default=None)
        covered = set() if best is None else fitting[best] & left
        if best is None or len(covered) < 2:
            entries.update({name: factors[name] for name in sorted(left)})
            break
        entries[best] = factors[min(covered)]
        left -= covered
    return entries


def _candidates(name: str) -> set[str]:
    """Patterns of one name: any layer number, and its beginnings and ends."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    ends = {".".join(["*", *parts[at:]]) for at in range(1, len(parts))}
    beginnings = {".".join([*parts[:at], "*"]) for at in range(1, len(parts))}
    return ends | beginnings | {".".join(parts)}
