"""A pickle read as data: nothing that it names is imported, and nothing that it asks for is called.

A pickle is a program for a small stack machine. Most of its instructions push plain values or
gather them into tuples, lists and dicts; a few name a *global* (``torch._utils._rebuild_tensor_v2``)
and *call* it. Here a global is only its name, and a call only a note of who was to be called with
what:

    GLOBAL 'torch.distributed.tensor DTensor'   ->  Global("torch.distributed.tensor", "DTensor")
    REDUCE, NEWOBJ, OBJ, INST, NEWOBJ_EX        ->  Record(cls, args, kwargs)
    BUILD                                       ->  Record.state
    APPEND(S), SETITEM(S), ADDITEMS             ->  Record.items, where the object is a Record

Python's own containers and numbers are understood by name (``collections.OrderedDict`` is a dict),
and so is whatever the caller hands in as `known`. State that is built onto a plain value, such as
the ``_metadata`` of a state dict, is dropped.

The input may be hostile. Nothing here recurses into what it has built, values are hashed only where
that is known to be cheap, whatever copies is paid for with the length of the data, and the memo is as
long as what is stored in it: time and memory are linear in the length of the pickle. Whatever is wrong
with it is a `DamagedFile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lazymerge.errors import DamagedFile
from lazymerge.files.pickle_literals import U8, Malformed, OutOfData, line, literal, number, text, whole_text
from lazymerge.files.pickle_records import MAX_KEY_LENGTH, Builder, Global, Record, call, extend

__all__ = ["Global", "Record", "TruncatedPickle", "load"]

LARGE = 1 << 24
"""Bytes of a pickle from which on it is looked at before it is read as a whole."""
START = 1 << 16
"""Bytes that are looked at."""

_WINDOW = 1 << 16  # bytes that are unpacked into a list at a time: indexing a list is several times cheaper
_PADDING = 16  # no instruction has more bytes than this in front of its variable part
_HINT = "the file is truncated, overwritten or no checkpoint; copy it again or write it anew"


class TruncatedPickle(DamagedFile):
    """The data ends before the pickle does."""


def load(
    data: bytes | memoryview,
    *,
    name: str,
    start: int = 0,
    persistent_load: Callable[[Any], object] | None = None,
    known: Mapping[str, object] | None = None,
) -> tuple[Any, int]:
    """The object pickled in `data` from byte `start` on, and the position after it.

    `known` says what globals stand for, by dotted name: a function, which is called with the tuple
    of arguments in place of the global, or a plain value. `persistent_load` turns persistent ids
    into objects; without it they are refused. `name` is what messages call the data.

    Raises `TruncatedPickle` if the data ends first and `DamagedFile` for anything else that is wrong.
    """
    data = bytes(data)
    builder = Builder(len(data), known or {}, persistent_load)
    try:
        return _run(data, start, name, builder)
    finally:
        # Its globals hold it and it holds them: without this the data of every file would stay until
        # the garbage collector came by.
        builder.found.clear()


def refuse_other(start: bytes, *, name: str) -> None:
    """Raise `DamagedFile` if `start`, the first bytes of a large pickle, cannot be: it is not read then."""
    try:
        _, end = load(start, name=name, persistent_load=lambda pid: None)
    except TruncatedPickle:
        return
    raise DamagedFile(f"{name}: a pickle of {end} bytes with {LARGE} bytes or more behind it", _HINT)


def _run(
    data: bytes,
    base: int,
    name: str,
    builder: Builder,
) -> tuple[Any, int]:
    """The interpreter. One long function, because a call for each instruction would triple its time.

    The instructions stand in the order of their frequency in the files of sharded models. The top
    of the stack is the variable `top`, the rest is `stack`; a mark is an object on the stack, and
    the bottom of the stack is one too. `code` is a window of the data from `base` on, as a list,
    with zeros behind the end of the data: zero is no instruction, so what runs past the end stops.
    """
    top: Any = _MARK
    stack: list[Any] = []
    marks: list[int] = []
    in_order: list[Any] = []  # the memo, while its entries are stored in order, as they are
    stored = 0  # how many
    memo: list[Any] | dict[int, Any] = in_order
    remember = in_order.append
    new_record = Record.__new__
    pos = 0
    try:
        if base >= len(data):
            raise OutOfData
        if data[base] in _PUTS:
            raise IndexError
        while base < len(data):
            window = data[base : base + _WINDOW + _PADDING]
            limit = min(_WINDOW, len(window))
            window += bytes(_PADDING + -len(window) % 4)
            code = list(window)
            words = _words(window)
            pos = 0
            while True:  # not `while pos < limit`: CPython 3.11 specialises a loop on its plain jump only
                if pos >= limit:
                    break
                op = code[pos]
                pos += 1
                if op == 0x72:  # LONG_BINPUT
                    index = words[pos & 3][pos >> 2]
                    if index == stored:
                        remember(top)
                        stored += 1
                    else:
                        memo, stored = _sparse(memo, index, top)
                    pos += 4
                elif op == 0x68:  # BINGET
                    stack.append(top)
                    top = memo[code[pos]]
                    pos += 1
                elif op == 0x4B:  # BININT1
                    stack.append(top)
                    top = code[pos]
                    pos += 1
                elif op > 0x73:
                    if op == 0x86:  # TUPLE2
                        top = (stack.pop(), top)
                    elif op == 0x94:  # MEMOIZE
                        if stored >= 0:
                            remember(top)
                            stored += 1
                        else:
                            memo, stored = _sparse(memo, len(memo), top)
                    elif op == 0x85:  # TUPLE1
                        top = (top,)
                    elif op == 0x7D:  # EMPTY_DICT
                        stack.append(top)
                        top = {}
                    elif op == 0x81:  # NEWOBJ
                        cls = stack.pop()
                        if type(cls) is not Global or type(top) is not tuple:
                            top = call(cls, top)
                        elif cls.build is not None:
                            top = cls.build(top)
                        else:
                            record = new_record(Record)
                            record.cls = cls
                            record.args = top
                            record.kwargs = record.state = record.items = None
                            top = record
                    elif op == 0x74:  # TUPLE
                        start = marks.pop()
                        stack.append(top)
                        top = tuple(stack[start + 1 :])
                        if stack[start] is not _MARK:
                            raise IndexError
                        del stack[start:]
                    elif op == 0x89:  # NEWFALSE
                        stack.append(top)
                        top = False
                    elif op == 0x75:  # SETITEMS
                        values = _above(marks.pop(), stack, top)
                        top = stack.pop()
                        builder.set_items(top, values)
                    elif op == 0x87:  # TUPLE3
                        value = stack.pop()
                        top = (stack.pop(), value, top)
                    elif op == 0x8C:  # SHORT_BINUNICODE
                        end = pos + 1 + code[pos]
                        stack.append(top)
                        top = text(data, base + pos + 1, base + end)
                        pos = end
                    elif op == 0x88:  # NEWTRUE
                        stack.append(top)
                        top = True
                    elif op == 0x93:  # STACK_GLOBAL
                        top = builder.find(stack.pop(), top)
                    elif op == 0x80:  # PROTO
                        if code[pos] > 5:
                            raise Malformed(f"protocol {code[pos]}, where 5 is the newest")
                        pos += 1
                        if code[pos] in _PUTS:
                            raise IndexError
                    elif op == 0x95:  # FRAME
                        if base + pos + 8 + U8(window, pos)[0] > len(data):
                            raise OutOfData
                        pos += 8
                        if top is _MARK and code[pos] in _PUTS:
                            raise IndexError
                    elif op == 0x8F:  # EMPTY_SET
                        stack.append(top)
                        top = set()
                    elif op == 0x90:  # ADDITEMS
                        values = _above(marks.pop(), stack, top)
                        top = stack.pop()
                        builder.add_items(top, values)
                    elif op == 0x91:  # FROZENSET
                        top = builder.frozenset(_above(marks.pop(), stack, top))
                    elif op == 0x92:  # NEWOBJ_EX
                        value = stack.pop()
                        top = call(stack.pop(), value, top)
                    else:
                        stack.append(top)
                        top, end = literal(op, data, base + pos)
                        pos = end - base
                elif op == 0x28:  # MARK
                    stack.append(top)
                    top = _MARK
                    marks.append(len(stack))
                    if code[pos] in _PUTS:
                        raise IndexError
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + words[pos & 3][pos >> 2]
                    stack.append(top)
                    try:
                        top = data[base + pos + 4 : base + end].decode()
                    except UnicodeDecodeError:
                        top = text(data, base + pos + 4, base + end)
                    pos = end
                elif op == 0x52:  # REDUCE
                    cls = stack.pop()
                    if type(cls) is not Global or type(top) is not tuple:
                        top = call(cls, top)
                    elif cls.build is not None:
                        top = cls.build(top)
                    else:
                        record = new_record(Record)
                        record.cls = cls
                        record.args = top
                        record.kwargs = record.state = record.items = None
                        top = record
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(top)
                    top = ()
                elif op == 0x73:  # SETITEM
                    key = stack.pop()
                    target = stack.pop()
                    if type(target) is dict and type(key) is str and len(key) < MAX_KEY_LENGTH:
                        target[key] = top
                    else:
                        builder.set_items(target, [key, top])
                    top = target
                elif op == 0x62:  # BUILD
                    target = stack.pop()
                    if type(target) is Record:
                        target.state = top
                    elif target is _MARK:
                        raise IndexError
                    top = target
                elif op == 0x4E:  # NONE
                    stack.append(top)
                    top = None
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(top)
                    top = memo[words[pos & 3][pos >> 2]]
                    pos += 4
                elif op == 0x71:  # BINPUT
                    index = code[pos]
                    if index == stored:
                        remember(top)
                        stored += 1
                    else:
                        memo, stored = _sparse(memo, index, top)
                    pos += 1
                elif op == 0x51:  # BINPERSID
                    if top is _MARK:
                        raise IndexError
                    top = builder.persistent(top)
                elif op == 0x4D:  # BININT2
                    stack.append(top)
                    top = code[pos] + 256 * code[pos + 1]
                    pos += 2
                elif op == 0x5D:  # EMPTY_LIST
                    stack.append(top)
                    top = []
                elif op == 0x65:  # APPENDS
                    values = _above(marks.pop(), stack, top)
                    top = stack.pop()
                    extend(top, values)
                elif op == 0x61:  # APPEND
                    value = top
                    top = stack.pop()
                    extend(top, [value])
                elif op == 0x63:  # GLOBAL
                    stack.append(top)
                    top, end = _named(builder, data, base + pos)
                    pos = end - base
                elif op == 0x2E:  # STOP
                    if marks or not stack or stack[0] is not _MARK:
                        raise IndexError
                    return top, base + pos
                elif op == 0x6C:  # LIST
                    top = _above(marks.pop(), stack, top)
                elif op == 0x64:  # DICT
                    values = _above(marks.pop(), stack, top)
                    top = {}
                    builder.set_items(top, values)
                elif op == 0x67:  # GET
                    digits, end = line(data, base + pos)
                    stack.append(top)
                    top = memo[number(digits)]
                    pos = end - base
                elif op == 0x70:  # PUT
                    digits, end = line(data, base + pos)
                    memo, stored = _sparse(memo, number(digits), top)
                    pos = end - base
                elif op == 0x69:  # INST
                    values = _above(marks.pop(), stack, top)
                    cls, end = _named(builder, data, base + pos)
                    top = call(cls, tuple(values))
                    pos = end - base
                elif op == 0x6F:  # OBJ
                    values = _above(marks.pop(), stack, top)
                    top = call(values[0], tuple(values[1:]))
                elif op == 0x50:  # PERSID
                    digits, end = line(data, base + pos)
                    stack.append(top)
                    top = builder.persistent(whole_text(digits))
                    pos = end - base
                elif op == 0x30 or op == 0x31:  # POP, POP_MARK
                    if op == 0x31 or top is _MARK:
                        _above(marks.pop(), stack, top)
                    top = stack.pop()
                    if top is _MARK and code[pos] in _PUTS:
                        raise IndexError
                elif op == 0x32:  # DUP
                    if top is _MARK:
                        raise IndexError
                    stack.append(top)
                else:
                    stack.append(top)
                    top, end = literal(op, data, base + pos)
                    pos = end - base
            base += pos
            pos = 0
        raise OutOfData
    except OutOfData:
        found = ""
    except IndexError:
        found = "an instruction for values or a mark that are not on the stack"
    except KeyError:
        found = "a value of the memo that was never stored" if base + pos + 4 <= len(data) else ""
    except Malformed as error:
        found = str(error)
    if not found:
        raise TruncatedPickle(f"{name}: its pickle is cut off at byte {len(data)}", _HINT)
    raise DamagedFile(f"{name}: the pickle has {found} (at byte {base + pos})", _HINT)


def _sparse(memo: list[Any] | dict[int, Any], index: int, value: object) -> tuple[dict[int, Any], int]:
    """The memo as a dict, since its entries are not stored in order, and no length to go on from."""
    entries = dict(enumerate(memo)) if isinstance(memo, list) else memo
    entries[index] = value
    return entries, -1


class _Mark:
    """What lies on the stack where MARK was, and at its bottom; it never gets into a value."""

    __slots__ = ()


_MARK = _Mark()
_PUTS = frozenset(b"rqp\x94")  # what would store a mark that is on top


def _above(start: int, stack: list[Any], top: object) -> list[Any]:
    """The values above the mark at `start`, taken off the stack together with the mark."""
    stack.append(top)
    if stack[start] is not _MARK:
        raise IndexError
    values = stack[start + 1 :]
    del stack[start:]
    return values


def _named(builder: Builder, data: bytes, start: int) -> tuple[object, int]:
    """The global that two lines name, and the position after them."""
    module, end = line(data, start)
    name, end = line(data, end)
    return builder.find(whole_text(module), whole_text(name)), end


def _words(window: bytes) -> tuple[memoryview, ...]:
    """The 32-bit numbers at each position: that at `pos` is ``words[pos & 3][pos >> 2]``.

    They are those of a little-endian machine, as all that lazymerge copies is.
    """
    view = memoryview(window)
    return (view.cast("I"), *(view[shift : shift - 4].cast("I") for shift in (1, 2, 3)))
