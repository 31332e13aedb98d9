"""Stores of others: what `kvd.create` makes besides its own types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from kvd.client.calls.backend import TYPES
from kvd.errors import ConfigError, NotAllowed
from kvd.optimizer.fields import shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP = "kvd.stores"
MAX_NAME_CHARS = 100

#: Makes a store; it is called with the settings that `kvd.create` was given, as keywords.
StoreFactory: TypeAlias = Callable[..., Any]

C = TypeVar("C", bound=type)

_factories: dict[str, StoreFactory] = {}


class KVStoreBase(ABC):
    """What a training loop needs of a store. After MXNet's class of this name; `kvd.KVStore` is one.

    Derive from it, or write a class with the same members. Make it known with `register_store`, with
    ``@KVStoreBase.register``, or as an entry point of the group ``kvd.stores``. Keys are str or int; a list of keys
    takes a list of values; a value is an array, or a list of arrays, one per device.

    Attributes:
        OPTIMIZER: the capability of a store that updates values by itself.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"

    @abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Any:
        """Gives rank 0's value to everyone's ``out``; None: into ``value``. Makes the key if it is new."""

    @abstractmethod
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Merges the values of all workers and devices, and gives the result to ``out``; None: into ``value``."""

    @staticmethod
    @abstractmethod
    def is_capable(capability: str) -> bool:
        """Whether the store has a capability, such as `OPTIMIZER`."""

    @property
    @abstractmethod
    def type(self) -> str:
        """The name under which the store is created."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this worker, from 0 to `num_workers` - 1."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers."""

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the values with this optimizer from now on. Raises NotAllowed unless a class overrides it."""
        raise self._incapable()

    def save_optimizer_states(self, path: Any, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state to a file. Raises NotAllowed unless a class overrides it."""
        raise self._incapable()

    def load_optimizer_states(self, path: Any) -> None:
        """Read the optimizer's state from a file. Raises NotAllowed unless a class overrides it."""
        raise self._incapable()

    def _incapable(self) -> NotAllowed:
        return NotAllowed(f"a store of type {self.type!r} has no optimizer: update the values in the program")

    @staticmethod
    def register(cls: C) -> C:
        """Makes the class known to `kvd.create` under its own name, in lower case. Raises ConfigError."""
        if not isinstance(cls, type):
            raise ConfigError(f"{shown(cls)} is not a class: use register_store for another factory", setting="type")
        register_store(cls.__name__, cls)
        return cls


def register_store(name: str, factory: StoreFactory) -> None:
    """From now on, in this process, ``kvd.create(name, **settings)`` gives ``factory(**settings)``.

    Args:
        name: in upper or lower case. It may be one that MXNet has for a type of kvd, such as ``"byteps"``.
        factory: a class or a function. What it makes has at least `broadcast` and `pushpull`, see `KVStoreBase`.

    Raises:
        ConfigError: the name belongs to a type of kvd or to another factory, or is no name; or the factory is none.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        text = f"the name of a store is a str of 1 to {MAX_NAME_CHARS} characters, not {shown(name)}"
        raise ConfigError(text, setting="type")
    if not callable(factory):
        raise ConfigError(f"a factory of stores is a class or a function, not {shown(factory)}", setting="type")
    lower = name.lower()
    if lower in TYPES:
        raise ConfigError(f"{name!r} is a type of kvd's own: take another name", setting="type")
    if _factories.setdefault(lower, factory) is not factory:
        raise ConfigError(f"another store is registered as {name!r}: take another name", setting="type")


def registered_names() -> list[str]:
    """The names that `create_registered` knows."""
    installed = {entry.name.lower() for entry in _entry_points()}
    return sorted((installed | _factories.keys()) - TYPES.keys())


def find_factory(name: object) -> StoreFactory | None:
    """What makes stores of this name: what was registered in this process, else an entry point. None: a type of kvd,
    or nothing.

    Raises:
        ConfigError: the entry point cannot be loaded, or is no factory.
    """
    if not isinstance(name, str) or name.lower() in TYPES:
        return None
    lower = name.lower()
    factory = _factories.get(lower)
    if factory is not None:
        return factory
    for entry in _entry_points():
        if entry.name.lower() == lower:
            return _loaded(entry)
    return None


def _loaded(entry: EntryPoint) -> StoreFactory:
    try:
        factory = entry.load()
    except Exception as error:
        text = f"the store {entry.name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(text, setting="type") from error
    if not callable(factory):
        raise ConfigError(f"the store {entry.name!r} ({entry.value}) is neither a class nor a function", setting="type")
    made: StoreFactory = factory
    return made


def make_store(name: str, factory: StoreFactory, settings: dict[str, Any]) -> Any:
    """What the factory makes of the settings.

    Raises:
        ConfigError: that is no store.
        What the factory raises.
    """
    store = factory(**settings)
    missing = [member for member in ("broadcast", "pushpull") if not callable(getattr(store, member, None))]
    if missing:
        text = f"the factory of {name!r} gave a {type(store).__name__}, which has no {' and no '.join(missing)}"
        raise ConfigError(text, setting="type")
    return store


def _entry_points() -> EntryPoints:
    """Of stores. The module takes long to import, and most programs name a type of kvd."""
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)
