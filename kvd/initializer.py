"""What a row of a table is before its first update: pure data, as optimizers are.

A row that nobody has updated takes no memory: it is calculated when it is read, from the seed, the name of the key and
the row id alone. So it reads the same on every node and platform, and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.optimizer.fields import normalise, require

__all__ = ["Initializer", "Zeros", "Constant", "Normal", "Uniform"]


@dataclass(frozen=True, slots=True)
class Initializer:
    """The base of the initializers below; not one itself."""

    def __post_init__(self) -> None:
        normalise(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a field is out of its range."""


@dataclass(frozen=True, slots=True)
class Zeros(Initializer):
    """Every element is 0."""


@dataclass(frozen=True, slots=True)
class Constant(Initializer):
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True, slots=True)
class Uniform(Initializer):
    """Every element is drawn from the numbers between ``low`` and ``high``.

    It is ``low + (high − low) · u`` in float64, with a ``u`` of 53 bits in [0, 1), rounded to the dtype of the table:
    in float32 an element may therefore be ``high`` itself.

    Args:
        low, high: ``low ≤ high``.
        seed: ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    low: float
    high: float
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if a field is out of its range."""
        require("high", self.low <= self.high, f"≥ low, which is {self.low}", self.high)
        require("seed", self.seed >= 0, "≥ 0", self.seed)


@dataclass(frozen=True, slots=True)
class Normal(Initializer):
    """Every element is drawn from a normal distribution with mean 0 and standard deviation ``std``, nearly.

    Only + − × ÷ are used, so that the bits are the same everywhere: twelve uniform numbers are added, and Teichroew's
    polynomial (D. Knuth, The Art of Computer Programming, volume 2, section 3.4.1) bends the sum into shape. The
    distribution function is that of a normal one to within 0.00002, the standard deviation to within 0.0001 of itself,
    and the kurtosis is 3.002. Beyond 5 standard deviations there is a fifth more than there should be, and nothing
    beyond 8.65. Elements come in steps of 0.000015 standard deviations.

    Args:
        std: ≥ 0.
        seed: ≥ 0.

    Raises:
        ConfigError: a field is out of its range; ``setting`` names it.
    """

    std: float
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if a field is out of its range."""
        require("std", self.std >= 0, "≥ 0", self.std)
        require("seed", self.seed >= 0, "≥ 0", self.seed)
