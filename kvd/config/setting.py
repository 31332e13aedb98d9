"""Declaration of one setting: its three spellings, and how its values are parsed, checked and shown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from kvd.config.values import ACCEPTED, READERS, Kind, Value, quoted, size_text
from kvd.errors import ConfigError

Role = Literal["scheduler", "server", "worker"]

ROLES: Final[tuple[Role, ...]] = ("scheduler", "server", "worker")

_KINDS: Final[dict[str, Kind]] = {"str": "text", "bool": "boolean", "int": "integer", "int | None": "integer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Description of one setting. The command line makes its flags from these.

    Attributes:
        name: the field of `Config`, and the key in the file.
        kind: how its text is read.
        optional: whether ``none`` (``None``) is one of its values.
        help: one phrase, without a full stop.
        unit: ``"bytes"``, ``"s"`` or empty.
        choices: the texts that are accepted; empty if any is.
        minimum: the smallest number that is accepted, in its unit.
        maximum: the largest, in its unit.
        used_by: the roles that act on it; empty if only the launcher does.
        fallback: variables of other launchers that are read before the default applies.
        default: its value when none is given.
    """

    name: str
    kind: Kind
    optional: bool
    help: str
    unit: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    used_by: tuple[Role, ...]
    fallback: tuple[str, ...]
    default: Value

    @property
    def env(self) -> str:
        """The environment variable, such as ``KVD_SLICE_BYTES``."""
        return f"KVD_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The flag of the command line, such as ``--slice-bytes``."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, raw: object, origin: str = "keyword") -> Value:
        """Read a value of this setting from text, or check one that already has its type.

        Args:
            raw: what was given.
            origin: where it was given, for the error.

        Raises:
            ConfigError: it is no value of this setting; the message says which values are.
        """
        if self.optional and (raw is None or (isinstance(raw, str) and raw.strip().lower() == "none")):
            return None
        value = READERS[self.kind](raw)
        if value is None or not self._in_range(value):
            text = f"{self.name} = {quoted(raw)} (from {origin}): expected {self.accepted()}"
            raise ConfigError(text, setting=self.name)
        return value

    def accepts(self, raw: object) -> bool:
        """Return whether `parse` accepts this value."""
        try:
            self.parse(raw)
        except ConfigError:
            return False
        return True

    def accepted(self) -> str:
        """Describe the accepted values in words."""
        if self.choices:
            return " or ".join(choice or "nothing" for choice in self.choices)
        words = ACCEPTED[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f", from {self.show(self.minimum)} to {self.show(self.maximum)}"
        elif self.minimum is not None:
            words += f", at least {self.show(self.minimum)}"
        return words + (", or none" if self.optional else "")

    def show(self, value: Value) -> str:
        """Return the text of a value. `parse` restores the same value."""
        if value is None:
            return "none"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, str):
            return value
        if self.kind == "size":
            return size_text(int(value))
        if self.kind == "integer":
            return str(value)
        number = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return f"{number}s" if self.kind == "duration" else number

    def _in_range(self, value: str | int | float | bool) -> bool:
        if isinstance(value, str):
            return not self.choices or value in self.choices
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)


def declare(
    default: Value,
    help: str,  # noqa: A002 - the name that it has in Setting
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    used_by: tuple[Role, ...] = ROLES,
    fallback: tuple[str, ...] = (),
) -> Any:
    """Declare a field of `Config`; `setting_of` makes its `Setting`, whose attributes the arguments are."""
    metadata = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "used_by": used_by,
        "fallback": fallback,
    }
    return dataclasses.field(default=default, metadata=metadata)


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Return the setting of a field that `declare` made."""
    return Setting(
        name=field.name,
        kind=_kind(field),
        optional="None" in str(field.type),
        default=cast(Value, field.default),
        **field.metadata,
    )


def _kind(field: dataclasses.Field[Any]) -> Kind:
    if field.metadata["unit"] == "bytes":
        return "size"
    if field.metadata["unit"] == "s":
        return "duration"
    return _KINDS[str(field.type)]
