"""Registries of whatever has names, such as policies' parts, codecs and backends. Installed packages bring more.

A package has an entry point in the group ``locret_kit.plugins``, a module that registers when it is imported::

    [project.entry-points."locret_kit.plugins"]
    mine = "my_package.my_policies"
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from .naming import first_line, nearest

GROUP = "locret_kit.plugins"
T = TypeVar("T")


class Registry(dict[str, T]):
    """Items of one kind by name. A name that is not there yet is looked for in installed packages.

    Raises:
        ValueError: a name that nobody has, with those that there are; a name that another module has.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._modules: dict[str, str] = {}

    def __missing__(self, name: str) -> T:
        load_installed()
        if name in self:
            return self[name]
        near = nearest(name, self)
        raise ValueError(f"{self.kind}={name!r} must be one of: {', '.join(self)}{near and f'.{near}'}")

    def add(self, name: str, item: T, module: str) -> None:
        """Give an item a name. A module may do so again, as a notebook's cell does that is run twice."""
        if self._modules.setdefault(name, module) != module:
            raise ValueError(f"{self.kind}={name} is registered already, by {self._modules[name]}")
        self[name] = item

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator of a class or a function that gets these names."""

        def add(item: T) -> T:
            for name in names:
                self.add(name, item, item.__module__)
            return item

        return add


@cache
def load_installed() -> None:
    """Import the modules that installed packages name as plugins.

    Raises:
        ValueError: one of them fails; names it.
    """
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            what = f"entry point {entry.name} = {entry.value} of {GROUP}"
            raise ValueError(f"{what}: {type(error).__name__}: {first_line(error)}") from error
