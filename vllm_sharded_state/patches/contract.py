"""What a patch to vLLM is, and the conditions under which it is made.

A patch changes one upstream symbol. Its file's docstring says what it changes, why, how, since
which vLLM version the fault exists and when the patch can go; at its end stands one `Patch`.

The contract, in the order `Patch.apply` checks it:

1. switched off by name -> nothing happens (`Status.DISABLED`)
2. in place already -> nothing happens, it never stacks on itself (`Status.APPLIED`)
3. the symbol is missing, or belongs to somebody else -> `PatchError` that names it
4. the probe does not find the fault -> nothing happens (`Status.NOT_NEEDED`)
5. replace, probe again; the fault still shows -> put back, `PatchError`
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from vllm_sharded_state.errors import PatchError

#: Attribute of every replacement: the name of the patch that made it.
MARK = "__vss_patch__"

Function = Callable[..., Any]


class Status(Enum):
    """What became of a patch; the value is the wording for logs."""

    APPLIED = "applied"
    DISABLED = "switched off"
    NOT_NEEDED = "not needed, vLLM behaves already"


class _Missing:
    """Type of the value that stands for `no such attribute`."""


_MISSING = _Missing()


class _HandedOn:
    """Stands for a method that a class lacks and hands on with its `__getattr__`."""

    def __init__(self, owner: type, attribute: str) -> None:
        self.__name__, self.__qualname__ = attribute, f"{owner.__qualname__}.{attribute}"

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        return instance.__getattr__(self.__name__)(*args, **kwargs)


@dataclass(frozen=True)
class _Place:
    """An attribute that a patch replaced, with what its owner itself held there before."""

    owner: Any
    attribute: str
    before: Any
    after: Any


_places: dict[str, list[_Place]] = {}


@dataclass(frozen=True)
class Patch:
    """One change to one upstream symbol.

    Attributes:
        name: what switches it off in `VSS_DISABLE_PATCHES`.
        module: upstream module in which the symbol is replaced.
        symbol: name of a function in it, or `Class.method`. A method the class only inherits is
            added to the class itself.
        probe: runs the symbol as it now stands and tells whether the fault shows. It must not log,
            write files, or touch a device: it runs in every process, twice.
        make: takes the function in place (for a static method, or `__new__`, the plain function)
            and returns its replacement.
        defined_in: `module:qualified name` of the function expected there, where that is not
            `module:symbol`: a name imported by value, or an inherited method.
        importers: further modules that hold the same function by value under the same name.
        importers_if_loaded: such modules that are not imported for the patch's sake: one that is
            imported later finds the replacement.
        handed_on: the class may lack the method and hand it on with its `__getattr__`; then the
            method is added to it, and the function in place is the one that hands on.
    """

    name: str
    module: str
    symbol: str
    probe: Callable[[], bool]
    make: Callable[[Function], Function]
    defined_in: str = ""
    importers: tuple[str, ...] = ()
    importers_if_loaded: tuple[str, ...] = ()
    handed_on: bool = False

    @property
    def target(self) -> str:
        """The upstream symbol, written out for messages."""
        return f"{self.module}.{self.symbol}"

    def apply(self, disabled: bool = False) -> Status:
        """Make the change if it is wanted and needed.

        Raises:
            PatchError: the symbol is missing, somebody else replaced it, the probe cannot run, or
                the fault still shows afterwards. Upstream is then as it was.
        """
        if disabled:
            return Status.DISABLED
        if self.name in _places:
            return Status.APPLIED
        loaded = [module for module in self.importers_if_loaded if module in sys.modules]
        owners = [self._find_owner(module) for module in (self.module, *self.importers, *loaded)]
        attribute = self.symbol.rpartition(".")[2]
        raws = [self._find(owner, attribute) for owner in owners]
        if all(_is_marked(_plain(raw), self.name) for raw in raws):
            return Status.APPLIED
        for raw in raws:
            self._refuse_foreign(_plain(raw))
        if not self._run_probe("before"):
            return Status.NOT_NEEDED
        self._replace(owners, attribute, raws[0])
        healed = False
        try:
            healed = not self._run_probe("after")
        finally:
            if not healed:
                self.undo()
        if not healed:
            raise PatchError(
                f"patch {self.name!r}: the fault still shows after {self.target} was replaced; "
                f"put back. {_switch_off(self.name)}"
            )
        return Status.APPLIED

    def undo(self) -> None:
        """Put upstream back as it was before `apply`; does nothing if that changed nothing.

        Raises:
            PatchError: somebody replaced our replacement since.
        """
        places = _places.get(self.name, [])
        for place in places:
            if vars(place.owner).get(place.attribute) is not place.after:
                raise PatchError(
                    f"patch {self.name!r} cannot be undone: {self.target} was replaced again by "
                    f"{_whose(_plain(vars(place.owner).get(place.attribute)))}"
                )
        for place in places:
            if place.before is _MISSING:
                delattr(place.owner, place.attribute)
            else:
                setattr(place.owner, place.attribute, place.before)
        _places.pop(self.name, None)

    def _find_owner(self, module: str) -> Any:
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, something it imports is not
            raise PatchError(self._missing(module)) from error
        for name in self.symbol.split(".")[:-1]:
            owner = self._find(owner, name)
        return owner

    def _find(self, owner: Any, attribute: str) -> Any:
        found = inspect.getattr_static(owner, attribute, _MISSING)
        hands_on = self.handed_on and isinstance(owner, type) and hasattr(owner, "__getattr__")
        if found is _MISSING and hands_on:
            return _HandedOn(owner, attribute)
        if found is _MISSING:
            home = owner.__name__ if isinstance(owner, ModuleType) else owner.__qualname__
            raise PatchError(self._missing(f"{home}.{attribute}"))
        return found

    def _missing(self, what: str) -> str:
        return (
            f"patch {self.name!r}: {what} is missing, needed to reach {self.target}. "
            f"{_switch_off(self.name)}"
        )

    def _refuse_foreign(self, function: Any) -> None:
        expected_module, _, expected_name = (
            self.defined_in or f"{self.module}:{self.symbol}"
        ).partition(":")
        package = expected_module.partition(".")[0]
        is_upstream = isinstance(function, _HandedOn) or (
            getattr(function, "__module__", None) == expected_module
            and getattr(function, "__qualname__", None) == expected_name
            # functools.wraps copies the two names above; where the code lives it cannot copy.
            and _code_module(function).partition(".")[0] == package
            and not hasattr(function, MARK)
        )
        if not is_upstream:
            raise PatchError(
                f"patch {self.name!r}: {self.target} was already replaced by {_whose(function)}; "
                f"two changes to one function are not stacked. Remove the other one, or: "
                f"{_switch_off(self.name)}"
            )

    def _run_probe(self, when: str) -> bool:
        try:
            return self.probe()
        except Exception as error:
            raise PatchError(
                f"patch {self.name!r}: its probe of {self.target} failed {when} the change: "
                f"{type(error).__name__}: {error}. {_switch_off(self.name)}"
            ) from error

    def _replace(self, owners: list[Any], attribute: str, raw: Any) -> None:
        original = _plain(raw)
        replacement = self.make(original)
        replacement.__name__ = original.__name__
        replacement.__qualname__ = original.__qualname__
        replacement.__doc__ = replacement.__doc__ or original.__doc__
        setattr(replacement, MARK, self.name)
        replacement.__wrapped__ = original  # type: ignore[attr-defined]
        after = (
            type(raw)(replacement) if isinstance(raw, (staticmethod, classmethod)) else replacement
        )
        _places[self.name] = []
        for owner in owners:
            place = _Place(owner, attribute, vars(owner).get(attribute, _MISSING), after)
            setattr(owner, attribute, after)
            _places[self.name].append(place)


def _plain(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


#: The module of the wrappers that torch's own decorators make, such as `torch.no_grad()`.
_TORCH_DECORATORS = "torch.utils._contextlib"


def _code_module(function: Any) -> str:
    """Return the module whose code runs, which a copied `__module__` does not change."""
    scope = getattr(function, "__globals__", None)
    if scope is not None:
        name = str(scope.get("__name__", ""))
        if name == _TORCH_DECORATORS and hasattr(function, "__wrapped__"):
            return _code_module(function.__wrapped__)
        return name
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _is_marked(function: Any, name: str) -> bool:
    # A wrapper of somebody else's may have copied our mark along with the rest of __dict__.
    own_package = __name__.partition(".")[0]
    return (
        getattr(function, MARK, None) == name
        and _code_module(function).partition(".")[0] == own_package
    )


def _whose(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or repr(function)
    mark = getattr(function, MARK, None)
    marked = f" (marked as patch {mark!r} of this package)" if mark is not None else ""
    return f"{_code_module(function)}.{name}{marked}"


def _switch_off(name: str) -> str:
    return f"VSS_DISABLE_PATCHES={name} starts vLLM without this patch."
