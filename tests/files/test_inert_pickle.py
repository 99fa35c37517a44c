"""Pickles read as data: the same values as Python's own reader, and nothing that they ask for is done."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import io
import os
import pickle
import random
import struct
import sys
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazymerge.errors import DamagedFile, LazymergeError
from lazymerge.files.inert_pickle import Global, Record, TruncatedPickle, load

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def read(data: bytes, **options: Any) -> Any:
    return load(data, name="x.pkl", **options)[0]


# ------------------------------------------------------------------------------ the same as Python's reader

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.binary(max_size=20).map(bytearray)
)
keys = (
    st.text(max_size=8)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.tuples(st.text(max_size=3), st.integers())
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.dictionaries(keys, inner).map(collections.OrderedDict)
    ),
    max_leaves=40,
)


def plain(value: Any) -> Any:
    """The value as this reader gives it: ordered dicts are dicts."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(inner) for inner in value)
    return value


@settings(max_examples=150, deadline=None)
@given(values)
def test_plain_data_is_read_as_python_reads_it(value: Any) -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps(value, protocol)
        assert repr(read(data)) == repr(plain(pickle.loads(data)))


@settings(max_examples=60, deadline=None)
@given(values)
def test_the_slow_pickler_of_python_is_read_too(value: Any) -> None:
    for protocol in PROTOCOLS:
        out = io.BytesIO()
        pickle._Pickler(out, protocol).dump(value)  # type: ignore[attr-defined]
        assert repr(read(out.getvalue())) == repr(plain(pickle.loads(out.getvalue())))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_values_cross_the_windows(protocol: int) -> None:
    value = {
        f"key {i}": [("x" * (i * 37 % 5000), i * 1001, float(i)), b"y" * (i * 91 % 3000)] for i in range(800)
    } | {"big": "z" * 200_000, "raw": bytes(range(256)) * 600, "number": 7**5000}
    data = pickle.dumps(value, protocol)
    assert len(data) > 1 << 20
    assert read(data) == value


def test_slices_ranges_and_shared_values() -> None:
    shared = ["x"]
    value = read(pickle.dumps([shared, shared, slice(1, None, 2)], 2))
    assert value[0] is value[1]
    assert value[2] == slice(1, None, 2)
    assert isinstance(read(pickle.dumps(range(3))), Record)


def test_a_cyclic_list() -> None:
    value: list[Any] = []
    value.append(value)
    result = read(pickle.dumps(value, 4))
    assert result[0] is result


def test_several_pickles_one_after_another() -> None:
    data = b"head" + pickle.dumps(1) + pickle.dumps("two", 0) + pickle.dumps([3], 2)
    first, pos = load(data, name="x", start=4)
    second, pos = load(memoryview(data), name="x", start=pos)
    third, pos = load(data, name="x", start=pos)
    assert (first, second, third, pos) == (1, "two", [3], len(data))


def test_lone_surrogates_stay() -> None:
    for protocol in PROTOCOLS:
        assert read(pickle.dumps("a\udc80b", protocol)) == "a\udc80b"


# ------------------------------------------------------------------------------ records


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("__dict__", "a")


class Stack(list):  # type: ignore[type-arg]
    pass


class WithKeywords:
    def __new__(cls, a: int, *, b: int = 0) -> WithKeywords:
        return super().__new__(cls)

    def __init__(self, a: int, *, b: int = 0) -> None:
        self.a = a

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (1,), {"b": 2}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_are_records(protocol: int) -> None:
    record = read(
        pickle.dumps(argparse.Namespace(lr=1e-3, name="x", nested=argparse.Namespace(a=[1])), protocol)
    )
    assert type(record) is Record
    assert record.cls == Global("argparse", "Namespace")
    assert str(record.cls) == "argparse.Namespace"
    assert record.args == ()
    assert record.attrs()["lr"] == 1e-3
    assert record.attrs()["nested"].attrs() == {"a": [1]}
    assert repr(record) == "<Record of argparse.Namespace>"


def test_state_in_slots() -> None:
    both = Slotted()
    both.a, both.b = 1, 2  # type: ignore[attr-defined]
    record = read(pickle.dumps(both, 2))
    assert record.state == ({"b": 2}, {"a": 1})
    assert record.attrs() == {"a": 1, "b": 2}
    assert Record(record.cls, state=(None, {"a": 1})).attrs() == {"a": 1}
    assert Record(record.cls, state=({"a": 1}, None)).attrs() == {"a": 1}
    assert Record(record.cls, state=(1, 2)).attrs() == {}
    assert Record(record.cls).attrs() == {}


def test_items_keywords_and_enums() -> None:
    stack = read(pickle.dumps(Stack([1, 2]), 2))
    assert stack.cls.name == "Stack"
    assert stack.items == [1, 2]
    keywords = read(pickle.dumps(WithKeywords(1), 4))
    assert (keywords.args, keywords.kwargs) == ((1,), {"b": 2})
    assert read(pickle.dumps(Colour.RED, 4)).args == (1,)
    assert read(pickle.dumps(PurePosixPath("/a/b"), 4)).args == ("/", "a", "b")
    assert read(pickle.dumps(collections.Counter("aab"), 2)).args == ({"a": 2, "b": 1},)
    assert read(pickle.dumps(collections.defaultdict(list, {"a": [1]}), 2)) == {"a": [1]}
    deque = read(pickle.dumps(collections.deque([1, 2], 5), 2))
    assert deque.items == [1, 2]


def test_globals_are_one_object_a_name() -> None:
    first, second = read(pickle.dumps([Stack, Stack, len], 0))[:2]
    assert first is second
    assert read(b"cbuiltins\ngetattr\n(c__main__\nOuter\nVInner\ntR.") == Global("__main__", "Outer.Inner")


def test_state_of_plain_values_is_dropped() -> None:
    ordered = collections.OrderedDict(a=1)
    ordered._metadata = {"x": 1}  # type: ignore[attr-defined]
    for protocol in PROTOCOLS:
        assert read(pickle.dumps(ordered, protocol)) == {"a": 1}


def test_what_the_caller_knows() -> None:
    data = b"(cmymod\nPair\n(I1\nI2\ntRcmymod\nCONSTANT\nt."
    assert read(data, known={"mymod.Pair": list, "mymod.CONSTANT": 7}) == ([1, 2], 7)
    assert read(b"(Pone\nVtwo\nQt.", persistent_load=lambda pid: f"<{pid}>") == ("<one>", "<two>")


# ------------------------------------------------------------------------------ hostile pickles


class Hostile:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def test_nothing_is_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}"
    attacks: list[Any] = [
        Hostile(os.system, command),
        Hostile(eval, f"open({str(canary)!r}, 'w')"),
        Hostile(exec, f"open({str(canary)!r}, 'w')"),
        Hostile(getattr, Hostile(__import__, "os"), "system"),
        Hostile(Hostile(getattr, Hostile(__import__, "os"), "system"), command),
        Hostile(map, os.system, [command]),
        Hostile(open, str(canary), "w"),
        [Hostile(os.mkdir, str(canary))],
    ]
    for attack in attacks:
        for protocol in PROTOCOLS:
            try:
                data = pickle.dumps(attack, protocol)
            except pickle.PicklingError:  # a callable that is no global
                continue
            assert "Record" in repr(read(data))
    raw = [
        f"cos\nsystem\n(S'{command}'\ntR.",
        f"(S'{command}'\nios\nsystem\n.",
        f"(cos\nsystem\nS'{command}'\no.",
        f"c__builtin__\ngetattr\n(c__builtin__\n__import__\n(S'os'\ntRS'system'\ntR(S'{command}'\ntR.",
        "cantigravity\ngeohash\n.",
    ]
    for text in raw:
        assert "antigravity" not in sys.modules
        read(text.encode())
    assert not canary.exists()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"0.",
        b"(.",
        b"t.",
        b"(0.",
        b"\x80\x06N.",
        b"K\x01\x85\x86.",
        b"\x85.",
        b"K\x01\x86.",
        b"(\x85t.",
        b"(K\x01\x86K\x02t.",
        b"(q\x00h\x00t.",
        b"q\x00h\x00.",
        b"\x80\x02q\x00h\x00.",
        b"(2t.",
        b"(Nb(t.",
        b"h\x00.",
        b"j\x00\x00\x00\xff.",
        b"g99999999999999999999\n.",
        b"gx\n.",
        b"Ix\n.",
        b"I" + b"9" * 5000 + b"\n.",
        b"L12\x00\n.",
        b"Fx\n.",
        b"S'x\n.",
        b"S'\\x'\n.",
        b"V\\u12\n.",
        b"X\x02\x00\x00\x00\xff\xff.",
        b"\x8c\x02\xff\xff.",
        b"T\xff\xff\xff\xff.",
        b"X\xff\xff\xff\xffa.",
        b"B\xff\xff\xff\xffa.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x8b\xff\xff\xff\x7f.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fa.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\xffa.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x82\x01.",
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"\x97.",
        b"\x98.",
        b"\x00.",
        b"\xff.",
        b"}]Ns.",
        b"}}Ns.",
        b"}\x8fNs.",
        b"}(Ku.",
        b"}(K\x01u.",
        b"(K\x01d.",
        b"NNNs.",
        b"NNa.",
        b"K\x01(Ne.",
        b"\x8f(]\x90.",
        b"N(N\x90.",
        b"(]\x91.",
        b"NN\x93.",
        b"N)R.",
        b"ca\nb\nNR.",
        b"ca\nb\nN\x81.",
        b"ca\nb\n)N)\x92.",
        b"(o.",
        b"(No.",
        b"NQ.",
        b"Px\n.",
        b"ca\n",
        b"ca" + b"a" * 5000 + b"\nb\n.",
        b"c\xff\nb\n.",
        b"}(" + b"\x8a\xff" + b"\x7f" * 255 + b"Nu.",
        b"cbuiltins\ncomplex\n(Vx\ntR" + b"\x86",
    ],
)
def test_malformed_pickles(data: bytes) -> None:
    with pytest.raises(DamagedFile) as caught:
        read(data)
    assert "x.pkl" in caught.value.problem
    assert "\n" not in caught.value.problem
    assert caught.value.hint


def sample(protocol: int) -> bytes:
    ordered = collections.OrderedDict(weights=[(1, 2, 3, 1 << 40), {"a": 1.5, "b": None}])
    return pickle.dumps(
        [ordered, argparse.Namespace(x={1, 2}, y=b"raw" * 9), "ü" * 5, True, -3, Colour.RED], protocol
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_truncated_at_every_byte(protocol: int) -> None:
    data = sample(protocol)
    read(data)
    for size in range(len(data)):
        with pytest.raises(TruncatedPickle):
            read(data[:size])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_flipped_bytes(protocol: int) -> None:
    generator = random.Random(protocol)
    data = bytearray(sample(protocol))
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 5))):
            damaged[generator.randrange(len(data))] = generator.randrange(256)
        with contextlib.suppress(LazymergeError):
            read(bytes(damaged), persistent_load=lambda pid: pid)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(LazymergeError):
        read(data, persistent_load=lambda pid: pid)


def in_small_thread(function: Any) -> None:
    """Run it where recursion into a deep value would show: on a stack of 256 KiB."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    old = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(old)
    assert not failures, failures


@pytest.mark.parametrize(
    "step", [b"\x85", b"]\x86", b"}\x86", b"(h\x00t\x86", b"(ca\nb\noNNN\x87"], ids=range(5)
)
def test_a_million_deep(step: bytes) -> None:
    count = 2_000_000 // (len(step) + 1)
    in_small_thread(lambda: read(b"Nq\x00" + step * count + b"."))
    for end in (
        b"}h\x01Ns.",
        b"\x8f(h\x01\x90.",
        b"(h\x01\x91.",
        b"h\x01)R.",
        b"h\x01h\x01\x93.",
        b"ca\nb\nh\x01R.",
    ):
        deep = b"Nq\x00" + step * 100_000 + b"q\x010" + end

        def refused(deep: bytes = deep) -> None:
            try:
                read(deep)
            except DamagedFile:
                return

        in_small_thread(refused)


def test_records_a_million_deep() -> None:
    in_small_thread(
        lambda: read(b"ca\nb\nq\x00" + b"0h\x00N\x85\x81" + b"q\x01h\x00h\x01\x85R" * 100_000 + b".")
    )
    nested = b"N" + b"q\x010h\x00)\x81h\x01b" * 100_000
    in_small_thread(lambda: read(b"ca\nb\nq\x000" + nested + b"."))


def test_known_functions_around_themselves_do_not_recurse() -> None:
    names = ("builtins.getattr", "copyreg.__newobj__", "copyreg._reconstructor", "builtins.set")
    for module, name in (dotted.split(".") for dotted in names):
        around = (
            f"c{module}\n{name}\nq\x000N".encode() + b"q\x010h\x00h\x01\x86" * 50_000 + b"q\x020h\x00h\x02R."
        )
        in_small_thread(lambda data=around: read(data))


def quadratic(name: bytes, argument: bytes, count: int) -> bytes:
    return b"]" + name + b"q\x00" + argument + b"\x85q\x0100" + b"(" + b"h\x00h\x01R" * count + b"e."


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (b"cbuiltins\nlist\n", b"(" + b"N" * 100_000 + b"t"),
        (b"cbuiltins\nset\n", b"(" + b"N" * 100_000 + b"t"),
        (b"cbuiltins\nbytes\n", b"B\xa0\x86\x01\x00" + bytes(100_000)),
        (b"ccollections\nOrderedDict\n", b"(" + b"N)\x86" * 50_000 + b"l"),
    ],
    ids=["list", "set", "bytes", "OrderedDict"],
)
def test_copies_over_and_over_are_refused(name: bytes, argument: bytes) -> None:
    data = quadratic(name, argument, 20_000)
    start = time.process_time()
    with pytest.raises(DamagedFile, match="over and over"):
        read(data)
    assert time.process_time() - start < 5


def test_a_name_that_grows_is_refused() -> None:
    long = b"X" + struct.pack("<I", 60_000) + b"a" * 60_000
    data = b"cbuiltins\ngetattr\nq\x00" + long + b"q\x01" + b"h\x00ca\nb\nh\x01\x86R" * 1000 + b"."
    assert isinstance(read(data), Record)
    short = b"cbuiltins\ngetattr\nq\x00ca\nb\nq\x02" + b"q\x02h\x00h\x02Vab\n\x86R" * 5000 + b"."
    with pytest.raises(DamagedFile, match="characters"):
        read(short)


def test_keys_chosen_to_collide_are_refused() -> None:
    modulus = (1 << 61) - 1
    items = b"".join(b"\x8a\x0a" + (i * modulus).to_bytes(10, "little") + b"N" for i in range(10_000))
    start = time.process_time()
    with pytest.raises(DamagedFile, match="large numbers"):
        read(b"}(" + items + b"u.")
    assert time.process_time() - start < 20
    assert len(read(pickle.dumps(dict.fromkeys(range(200_000))))) == 200_000


def test_keys_that_are_dear_are_refused() -> None:
    with pytest.raises(DamagedFile, match="characters"):
        read(pickle.dumps({"x" * 70_000: 1}))
    with pytest.raises(DamagedFile, match="parts"):
        read(pickle.dumps({tuple(range(300)): 1}))
    with pytest.raises(DamagedFile, match="frozenset"):
        read(pickle.dumps({frozenset({1}): 1}))
    bomb = b"}N" + b"q\x01h\x01h\x01h\x01\x870h\x01h\x01h\x01\x87" * 40 + b"Ns."
    with pytest.raises(DamagedFile):
        read(bomb)


def test_errors_in_large_pickles_name_the_place() -> None:
    data = pickle.dumps([(i, str(i)) for i in range(50_000)], 2)
    position = len(data) // 2
    damaged = data[:position] + b"\xff" * 20 + data[position + 20 :]
    with pytest.raises(DamagedFile, match=r"at byte \d{5,}") as caught:
        read(damaged)
    assert not isinstance(caught.value, TruncatedPickle)


STEPS = [
    *(bytes([op]) for op in b"()]}NN.2001abdelostuQR\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"),
    *(
        b"K\x01",
        b"M\x01\x02",
        b"J\xff\xff\xff\xff",
        b"I7\n",
        b"L7L\n",
        b"F1.5\n",
        b"S'a'\n",
        b"Va\n",
        b"\x8c\x01a",
    ),
    *(
        b"X\x01\x00\x00\x00b",
        b"C\x01z",
        b"\x96\x01" + bytes(7) + b"z",
        b"U\x01a",
        b"\x8a\x01\x05",
        b"G" + bytes(8),
    ),
    *(b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"r\x02\x00\x00\x00", b"j\x02\x00\x00\x00", b"p3\n", b"g3\n"),
    *(b"ca\nb\n", b"ia\nb\n", b"Px\n", b"Vlatin1\n", b"\x80\x02", b"\x95" + bytes(8)),
    *(
        f"c{name}\n".encode()
        for name in ("builtins\ngetattr", "builtins\nset", "builtins\nslice", "builtins\nint")
    ),
    *(
        f"c{name}\n".encode()
        for name in ("builtins\nbytes", "builtins\ndict", "builtins\ncomplex", "_codecs\nencode")
    ),
    *(
        f"c{name}\n".encode()
        for name in ("collections\nOrderedDict", "copyreg\n_reconstructor", "builtins\nobject")
    ),
]


def test_random_programs() -> None:
    generator = random.Random(3)
    read_whole = 0
    for _ in range(20_000):
        program = b"".join(generator.choices(STEPS, k=generator.randrange(2, 25))) + b"."
        with contextlib.suppress(LazymergeError):
            value = read(program, persistent_load=lambda pid: pid)
            read_whole += 1
            assert "_Mark" not in repr(value)
    assert read_whole > 100
