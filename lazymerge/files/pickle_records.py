"""The objects of a pickle that is only read: names, records of calls, and what is safe to build.

A global is a name and a call a `Record`, unless the name stands for something plain: Python's own
containers and numbers, and what the reader of a format adds. Building plain values has two traps
in a hostile pickle, which are closed here. Containers that are copied or hashed over and over, each
time by a few bytes of input, make time quadratic: whatever copies pays with the length of the data.
And keys can be chosen to collide, or to be dear to hash: they are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lazymerge.files.pickle_literals import Malformed

Meaning = Callable[[tuple[Any, ...]], object]

MAX_KEY_LENGTH = 1 << 16  # characters or bytes: equal keys are compared whole
_MAX_KEY_PARTS = 256  # of a tuple, with all tuples in it
_MAX_KEY_BITS = 1024
_FREE_KEYS = 1 << 24  # Python hashes numbers without a seed, so larger ones can be chosen to collide
_MAX_CHOSEN_KEYS = 1 << 13
_MAX_NAME = 4096  # characters of the dotted name of a global


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class, function or constant, and what a call of it builds, if that is known."""

    module: str
    name: str
    build: Meaning | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """An object as its pickle describes it: who was to be called with what, and what was then put into it.

    `cls` is the class or function (a `Record` where the pickle computes it), `state` the last
    thing that BUILD gave it, `items` what was appended to it (values) or set in it (key and value
    pairs). Records compare and hash by identity, and their repr does not show what is inside.
    """

    __slots__ = ("args", "cls", "items", "kwargs", "state")

    cls: Global | Record
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    state: Any
    items: list[Any] | None

    def __init__(
        self,
        cls: Global | Record,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        state: Any = None,
        items: list[Any] | None = None,
    ) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.state = state
        self.items = items

    def __repr__(self) -> str:
        return f"<Record of {self.cls if isinstance(self.cls, Global) else 'a computed class'}>"

    def attrs(self) -> dict[str, Any]:
        """The attributes that its state sets, those of ``__slots__`` among them; do not change it."""
        state = self.state
        if type(state) is dict:
            return state
        if type(state) is tuple and len(state) == 2:
            plain, slotted = state
            if type(slotted) is dict:
                return {**plain, **slotted} if type(plain) is dict and plain else slotted
            if type(plain) is dict:
                return plain
        return {}


def call(cls: object, args: object, kwargs: object = None) -> object:
    """What a call builds: what the global stands for, or a record of the call."""
    if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
        raise Malformed(f"a call with a {type(args).__name__} for its arguments")
    if type(cls) is Global:
        return cls.build(args) if cls.build is not None and not kwargs else Record(cls, args, kwargs)
    if type(cls) is Record:
        return Record(cls, args, kwargs)
    raise Malformed(f"a call of a {type(cls).__name__}")


def extend(target: object, values: list[Any]) -> None:
    """Append `values` to a list, or note that they were appended to a record."""
    if type(target) is list:
        target.extend(values)
    elif type(target) is Record:
        if target.items is None:
            target.items = []
        target.items.extend(values)
    else:
        raise Malformed(f"values put into a {type(target).__name__}")


class Builder:
    """What one pickle builds: its globals, each object once, its containers, and what they may cost."""

    def __init__(
        self, size: int, known: Mapping[str, object], persistent_load: Callable[[Any], object] | None
    ) -> None:
        self.known = known
        self.persistent_load = persistent_load
        self.found: dict[tuple[str, str], object] = {}
        self.copies_left = size  # each element was written once, in a byte or more
        self.chosen_keys_left = _MAX_CHOSEN_KEYS

    def persistent(self, pid: object) -> object:
        """The object of a persistent id."""
        if self.persistent_load is None:
            raise Malformed("a persistent id, which this pickle should not have")
        return self.persistent_load(pid)

    def find(self, module: object, name: object) -> object:
        """The `Global` of that name, or the plain value that it stands for."""
        if type(module) is not str or type(name) is not str:
            raise Malformed(f"a global named by a {type(module).__name__} and a {type(name).__name__}")
        found = self.found.get((module, name))
        if found is None:
            if len(module) + len(name) > _MAX_NAME:
                raise Malformed(f"a global with a name of {len(module) + len(name)} characters")
            found = self.found[module, name] = self._meaning(module, name)
        return found

    def set_items(self, target: object, values: list[Any]) -> None:
        """Set keys and values, which alternate in `values`, in a dict, or note them in a record."""
        if len(values) % 2:
            raise Malformed("a key without a value")
        pairs = iter(values)
        if type(target) is dict:
            for key, value in zip(pairs, pairs, strict=True):
                if type(key) is not str or len(key) >= MAX_KEY_LENGTH:
                    self._check_key(key)
                target[key] = value
        elif type(target) is Record:
            extend(target, list(zip(pairs, pairs, strict=True)))
        else:
            raise Malformed(f"items set in a {type(target).__name__}")

    def add_items(self, target: object, values: list[Any]) -> None:
        """Add elements to a set, or note them in a record."""
        if type(target) is set:
            target.update(self._keys(values))
        elif type(target) is Record:
            extend(target, values)
        else:
            raise Malformed(f"elements added to a {type(target).__name__}")

    def frozenset(self, values: list[Any]) -> frozenset[Any]:
        """A set of the values that cannot change."""
        return frozenset(self._keys(values))

    def spend(self, value: Any) -> Any:
        """`value`, whose elements are about to be copied."""
        self.copies_left -= len(value)
        if self.copies_left < 0:
            raise Malformed("the same values copied over and over")
        return value

    def _meaning(self, module: str, name: str) -> object:
        known = self.known.get(f"{module}.{name}")
        if known is None:
            own = _PYTHON.get(f"{_RENAMED.get(module, module)}.{name}")
            return Global(module, name, own and self._recording(own, Global(module, name)))
        return Global(module, name, known) if callable(known) else known

    def _recording(self, own: _Own, itself: Global) -> Meaning:
        """The meaning, with a record in place of what it does not build."""

        def build(args: tuple[Any, ...]) -> object:
            value = own(self, args)
            return Record(itself, args) if value is NotImplemented else value

        return build

    def _keys(self, values: Any) -> Any:
        """`values`, which can all be elements of a set."""
        for value in values:
            if type(value) is not str or len(value) >= MAX_KEY_LENGTH:
                self._check_key(value)
        return values

    def _check_key(self, key: object) -> None:
        """`Malformed` for a key that is dear to hash or to compare, or cannot be hashed."""
        if type(key) is not tuple:
            self._check_atom(key)
            return
        self._choose()
        todo: list[object] = [key]
        count = 0
        while todo:
            part = todo.pop()
            if type(part) is tuple:
                count += 1 + len(part)
                if count > _MAX_KEY_PARTS:
                    raise Malformed(f"a dict key of more than {_MAX_KEY_PARTS} parts")
                todo.extend(part)
            else:
                self._check_atom(part)

    def _check_atom(self, key: object) -> None:
        if key is None or isinstance(key, (bool, Global, Record)):
            return
        if isinstance(key, (str, bytes)):
            if len(key) >= MAX_KEY_LENGTH:
                raise Malformed(f"a dict key of {len(key)} characters")
        elif isinstance(key, int):
            if not 0 <= key < _FREE_KEYS:
                self._choose()
            if key.bit_length() > _MAX_KEY_BITS:
                raise Malformed(f"a dict key that is a number of {key.bit_length()} bits")
        else:
            if type(key).__hash__ is None or isinstance(key, (frozenset, slice)):
                raise Malformed(f"a dict key or set element that is a {type(key).__name__}")
            self._choose()

    def _choose(self) -> None:
        self.chosen_keys_left -= 1
        if self.chosen_keys_left < 0:
            raise Malformed(f"more than {_MAX_CHOSEN_KEYS} large numbers and tuples as dict keys")


# ------------------------------------------------------------------ what Python's own names stand for
#
# Each takes the arguments of the call and gives the plain value, or NotImplemented where the
# call should stay a record.

_Own = Callable[[Builder, tuple[Any, ...]], object]


def _copy_of(kind: Callable[[Any], object], *sources: type) -> _Own:
    """A container made empty, or of one argument of the types `sources`."""

    def build(builder: Builder, args: tuple[Any, ...]) -> object:
        if not args:
            return kind(())
        return kind(builder.spend(args[0])) if len(args) == 1 and type(args[0]) in sources else NotImplemented

    return build


def _set_of(kind: Callable[[Any], object]) -> _Own:
    def build(builder: Builder, args: tuple[Any, ...]) -> object:
        if not args:
            return kind(())
        if len(args) != 1 or type(args[0]) not in (list, tuple):
            return NotImplemented
        return kind(builder._keys(builder.spend(args[0])))

    return build


def _same(kind: Callable[[], object]) -> _Own:
    """Zero, or a number that is already of that type."""

    def build(builder: Builder, args: tuple[Any, ...]) -> object:
        if not args:
            return kind()
        return args[0] if len(args) == 1 and type(args[0]) is kind else NotImplemented

    return build


def _ordered_dict(builder: Builder, args: tuple[Any, ...]) -> object:
    if not args:
        return {}
    if len(args) != 1 or type(args[0]) is not list:  # Python 2 wrote a list of [key, value]
        return NotImplemented
    pairs = builder.spend(args[0])
    if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        return NotImplemented
    result: dict[Any, Any] = {}
    builder.set_items(result, [part for pair in pairs for part in pair])
    return result


def _default_dict(builder: Builder, args: tuple[Any, ...]) -> object:
    return {} if len(args) <= 1 else NotImplemented


def _complex(builder: Builder, args: tuple[Any, ...]) -> object:
    floats = len(args) <= 2 and all(type(part) is float for part in args)
    return complex(*args) if floats else NotImplemented


def _slice(builder: Builder, args: tuple[Any, ...]) -> object:
    plain = 1 <= len(args) <= 3 and all(part is None or type(part) is int for part in args)
    return slice(*args) if plain else NotImplemented


def _bytes_of(kind: type[bytes] | type[bytearray]) -> _Own:
    """Bytes made empty, of bytes, or of a text that holds one byte a character (protocols 0 to 2)."""

    def build(builder: Builder, args: tuple[Any, ...]) -> object:
        if not args:
            return kind()
        if len(args) == 1 and type(args[0]) in (bytes, bytearray):
            return kind(builder.spend(args[0]))
        if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
            return NotImplemented
        try:
            return kind(builder.spend(args[0]).encode("latin1"))
        except UnicodeEncodeError:
            raise Malformed("bytes written as a text with wider characters") from None

    return build


def _getattr(builder: Builder, args: tuple[Any, ...]) -> object:
    """The class inside a class that it names: nothing else is looked up."""
    if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
        return NotImplemented
    if len(args[1]) > _MAX_NAME or not args[1].isidentifier():
        return NotImplemented
    return builder.find(args[0].module, f"{args[0].name}.{args[1]}")


def _reconstructor(builder: Builder, args: tuple[Any, ...]) -> object:
    """An instance as protocols 0 and 1 make it."""
    if len(args) != 3 or type(args[0]) is not Global or type(args[1]) is not Global:
        return NotImplemented
    return Record(args[0]) if args[1].name == "object" and args[2] is None else NotImplemented


_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_PYTHON: dict[str, _Own] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "builtins.dict": _copy_of(dict, dict),
    "builtins.list": _copy_of(list, list, tuple),
    "builtins.tuple": _copy_of(tuple, list, tuple),
    "builtins.set": _set_of(set),
    "builtins.frozenset": _set_of(frozenset),
    "builtins.int": _same(int),
    "builtins.float": _same(float),
    "builtins.bool": _same(bool),
    "builtins.complex": _complex,
    "builtins.slice": _slice,
    "builtins.bytes": _bytes_of(bytes),
    "builtins.bytearray": _bytes_of(bytearray),
    "builtins.getattr": _getattr,
    "_codecs.encode": _bytes_of(bytes),
    "copyreg._reconstructor": _reconstructor,
}
