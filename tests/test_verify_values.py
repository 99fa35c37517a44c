"""Two checkpoints in memory, compared: what is equal in each element type, and what is said of the rest."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazymerge.checkpoint import Checkpoint
from lazymerge.compare import compare
from lazymerge.comparison import CompareOptions
from lazymerge.elements import in_memory
from lazymerge.errors import BudgetError, PlanError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
NAN, INF = math.nan, math.inf


def of(**tensors):
    return Checkpoint({name: in_memory(tensor) for name, tensor in tensors.items()}, "test")


def compared(one, other, workers=1, **options):
    return compare(of(x=one), of(x=other), CompareOptions(**options), workers=workers)


def differing(*args, **options):
    """The one difference of two tensors."""
    (difference,) = compared(*args, **options).differences
    return difference


def bits(dtype, *codes):
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[dtype.itemsize]
    return torch.tensor(codes, dtype=width).view(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTS, *INTEGERS, *COMPLEX, torch.bool], ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_one_changed_element_is_found_in_each_type(dtype, exact):
    torch.manual_seed(0)
    values = torch.randint(0, 2, (7, 5, 3))
    one = values.to(dtype)
    assert compared(one, one.clone(), exact=exact).same
    changed = values.clone()
    changed[4, 3, 2] = 1 - changed[4, 3, 2]
    found = differing(one, changed.to(dtype), exact=exact)
    assert (found.kind, found.name, found.mismatches, found.elements) == ("values", "x", 1, 105)
    assert found.first == (4, 3, 2)
    assert found.values == (values[4, 3, 2].item(), changed[4, 3, 2].item())
    assert found.largest == 1.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_differences_are_what_torch_computes(dtype):
    torch.manual_seed(1)
    one = torch.randn(300, 41).to(dtype)
    other = one + 1e-2 * torch.randn(300, 41).to(dtype)
    atol, rtol = 5e-3, 1e-2
    wide = one.double() - other.double()
    expected = wide.abs() > atol + rtol * other.double().abs()
    found = differing(one, other, atol=atol, rtol=rtol)
    assert found.mismatches == int(expected.sum()) > 0
    assert found.largest == float(wide.abs().max())
    first = expected.nonzero()[0]
    assert found.first == tuple(first.tolist())
    assert found.values == (one[tuple(first)].item(), other[tuple(first)].item())


def test_the_default_tolerance_is_absolute_and_one_millionth():
    zeros = torch.zeros(4, dtype=torch.float64)
    assert compared(zeros, zeros + 1e-6).same
    assert compared(zeros, zeros + 0.9e-6).identical == 0
    assert compared(zeros, zeros + 1.1e-6).counts["values"] == 1
    thousand = torch.full((4,), 1000.0)
    assert not compared(thousand, thousand + 0.001).same


def test_a_relative_tolerance_is_of_the_other_side():
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    assert compared(one, other, rtol=0.5).same
    assert not compared(other, one, rtol=0.5).same


def test_nothing_finite_is_close_to_infinity():
    finite, infinite = torch.tensor([1.0]), torch.tensor([INF])
    for options in ({}, {"rtol": 1.0}, {"atol": 1e30}):
        assert not compared(finite, infinite, **options).same
        assert not compared(infinite, finite, **options).same
    assert differing(finite, infinite).largest == INF


def test_nan_and_infinity_are_equal_to_themselves_and_counted_on_both_sides():
    one = torch.tensor([[NAN, INF, -INF], [0.0, 1.0, NAN]])
    found = compared(one, one.clone())
    assert found.same and found.identical == 1
    assert (found.nan, found.inf) == ((2, 2), (2, 2))
    other = torch.tensor([[NAN, INF, INF], [0.0, NAN, 3.0]])
    found = compared(one, other)
    assert (found.nan, found.inf) == ((2, 2), (2, 2))
    assert found.nonfinite[0].name == "x"
    (difference,) = found.differences
    assert difference.mismatches == 3
    assert difference.first == (0, 2)
    assert difference.values == (-INF, INF)


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTS, torch.float8_e8m0fnu, torch.complex64], ids=str)
def test_nonfinite_elements_are_counted_as_torch_counts_them(dtype):
    torch.manual_seed(2)
    raw = torch.randint(0, 256, (4096 * dtype.itemsize,), dtype=torch.uint8)
    raw[: 8 * dtype.itemsize] = torch.tensor(
        [*(255,) * (dtype.itemsize - 1), 127, *(255,) * dtype.itemsize] * 4
    )
    raw[8 * dtype.itemsize] = 128  # what fnuz types call NaN
    values = raw.view(dtype)
    number = values if dtype.is_complex or dtype == torch.float64 else values.float()
    found = compared(values, values.clone())
    assert found.nan[0] == found.nan[1] == int(number.isnan().sum())
    assert found.nan[0] > 0
    assert found.inf[0] == int((number.isinf() & ~number.isnan()).sum())
    other = values[torch.arange(4096) ^ 1]  # as many of them, where bytes differ
    assert compared(values, other).nan == found.nan


@pytest.mark.parametrize("dtype", [*EIGHTS, torch.float8_e8m0fnu], ids=str)
def test_a_single_nan_of_eight_bits_is_seen(dtype):
    tensor = torch.ones(1000).to(dtype)
    assert compared(tensor, tensor.clone()).nan == (0, 0)
    tensor[617] = NAN
    assert compared(tensor, tensor.clone()).nan == (1, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_single_nonfinite_element_is_seen(dtype):
    for value, expected in ((NAN, (1, 0)), (-NAN, (1, 0)), (INF, (0, 1)), (-INF, (0, 1))):
        tensor = torch.ones(1000, dtype=dtype)
        tensor[617] = value
        found = compared(tensor, tensor.clone())
        assert (found.nan[0], found.inf[0]) == expected


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.float32, 0x7FC00000, 0x7FC00001),
        (torch.float32, 0x7FC00000, 0xFFC00000),
        (torch.bfloat16, 0x7FC0, 0x7F81),
        (torch.float16, 0x7E00, 0x7C01),
        (torch.float8_e4m3fn, 0x7F, 0xFF),
        (torch.float8_e5m2, 0x7D, 0x7F),
    ],
)
def test_payloads_of_nan_differ_only_exactly(dtype, one, other):
    sides = bits(dtype, 0, one), bits(dtype, 0, other)
    assert compared(*sides).same
    assert compared(*sides).identical == 0
    found = differing(*sides, exact=True)
    width = 2 * dtype.itemsize
    assert found.bits == (f"{one:0{width}x}", f"{other:0{width}x}")
    assert (found.first, found.mismatches, found.largest) == ((1,), 1, 0.0)
    assert f"0x{one:0{width}x}" in str(found)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_zero_and_minus_zero_differ_only_exactly(dtype):
    one, other = torch.tensor([0.0]).to(dtype), torch.tensor([-0.0]).to(dtype)
    assert compared(one, other).same
    assert compared(one, other, atol=0).same
    assert differing(one, other, exact=True).mismatches == 1


def test_integers_of_64_bits_are_not_rounded():
    big = 2**62
    assert differing(torch.tensor([big]), torch.tensor([big + 1])).largest == 1.0
    top = torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert differing(top, torch.tensor([2**64 - 2], dtype=torch.uint64)).values == (2**64 - 1, 2**64 - 2)
    low = torch.tensor([-(2**63)])
    assert differing(low, torch.tensor([2**63 - 1])).largest == pytest.approx(2.0**64)


def test_complex_numbers_are_compared_part_by_part():
    one = torch.tensor([1 + 1j, complex(NAN, 1), 3 + 0j, complex(NAN, INF)])
    other = torch.tensor([1 + 1j, complex(NAN, 2), 3 + 4j, complex(NAN, INF)])
    found = compared(one, other)
    assert (found.nan, found.inf) == ((2, 2), (0, 0))
    assert found.differences[0].mismatches == 2
    assert found.differences[0].largest == 4.0
    json.dumps(found.to_json(), allow_nan=False)


def test_packed_types_are_compared_as_bytes():
    codes = torch.tensor([0x12, 0x34], dtype=torch.uint8)
    other = torch.tensor([0x12, 0x35], dtype=torch.uint8)
    four = torch.float4_e2m1fn_x2
    assert compared(codes.view(four), codes.view(four)).same
    assert differing(codes.view(four), other.view(four)).bits == ("34", "35")


# ---------------------------------------------------------------------------- names, shapes, types


def test_names_and_shapes_that_differ_are_listed_and_the_rest_is_compared():
    one = of(same=torch.ones(2), extra=torch.ones(3), shape=torch.ones(2, 3), more=torch.ones(1))
    other = of(same=torch.ones(2), lost=torch.ones(4), shape=torch.ones(3, 2))
    found = compare(one, other)
    assert found.counts == {"missing": 1, "extra": 2, "shape": 1, "dtype": 0, "values": 0, "setting": 0}
    assert [(each.kind, each.name, each.one, each.other) for each in found.differences] == [
        ("missing", "lost", None, "float32 [4]"),
        ("extra", "extra", "float32 [3]", None),
        ("extra", "more", "float32 [1]", None),
        ("shape", "shape", "float32 [2, 3]", "float32 [3, 2]"),
    ]
    assert found.tensors == found.identical == 1
    assert not found.same


def test_a_list_is_cut_and_the_counts_are_not():
    torch.manual_seed(3)
    tensors = {f"t{at}": torch.full((2,), float(at)) for at in range(1, 30)}
    found = compare(
        of(**tensors), of(**dict.fromkeys(tensors, torch.zeros(2))), CompareOptions(max_mismatches=3)
    )
    assert found.counts["values"] == 29
    assert [each.name for each in found.differences] == ["t29", "t28", "t27"]
    assert found.largest == 29.0
    none = compare(of(**tensors), of(x=torch.zeros(1)), CompareOptions(max_mismatches=0))
    assert none.differences == () and none.counts["extra"] == 29


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, *EIGHTS], ids=str)
def test_different_types_need_a_tolerance(narrow):
    torch.manual_seed(4)
    wide = torch.randn(50, 40)
    rounded = wide.to(narrow)
    found = compared(rounded, wide)
    assert found.counts["dtype"] == 1 and found.tensors == 0
    assert "--accept-rounding" in found.hint
    for sides in ((rounded, wide), (wide, rounded)):
        assert compared(*sides, accept_rounding=True).same
        assert compared(*sides, atol=10.0).same
        assert differing(*sides, atol=0.0).mismatches == int((rounded.double() != wide.double()).sum())
    wide[3, 3] += 1
    assert differing(rounded, wide, accept_rounding=True).mismatches == 1
    assert differing(rounded, wide, exact=True).kind == "dtype"


def test_integers_are_not_rounded_to_floats():
    found = compared(torch.arange(3), torch.arange(3.0), accept_rounding=True)
    assert found.counts["dtype"] == 1 and found.hint == ""
    assert compared(torch.arange(3), torch.arange(3.0), atol=0.0).same
    big = torch.tensor([2**53 + 1])
    assert not compared(big, torch.tensor([2.0**53], dtype=torch.float64), atol=0.0).same
    found = compared(torch.ones(2), torch.ones(2, dtype=torch.complex64), atol=1.0)
    assert found.counts["dtype"] == 1


@pytest.mark.parametrize(
    "options",
    [{"atol": -1.0}, {"rtol": NAN}, {"atol": INF}, {"exact": True, "atol": 1.0}, {"max_mismatches": -1}],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(PlanError):
        compared(torch.ones(1), torch.ones(1), **options)


# ------------------------------------------------------------------------------------------ blocks


def views(tensor):
    """The same elements by other gathers: in one piece, in rows, in columns, transposed."""
    whole = in_memory(tensor)
    columns = in_memory(tensor.t().contiguous())
    yield whole
    yield in_memory(tensor.flatten()).view(tuple(tensor.shape))
    yield columns.permute((1, 0))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_large_tensors_in_blocks_give_one_report(workers, monkeypatch):
    monkeypatch.setattr("lazymerge.compare._UNIT", 1 << 20)
    monkeypatch.setattr("lazymerge.compare.BLOCK", 1 << 18)
    torch.manual_seed(5)
    one = torch.randn(1500, 1024)
    other = one.clone()
    places = torch.randint(0, one.numel(), (40,)).unique()
    other.view(-1)[places] += 0.5
    nan = int(places[-1]) + 1
    other.view(-1)[nan % one.numel()] = NAN
    expected = ~((one == other) | (one.isnan() & other.isnan()))
    for gather in views(other):
        found = compare(of(x=one), Checkpoint({"x": gather}, "test"), workers=workers)
        (difference,) = found.differences
        assert difference.mismatches == int(expected.sum())
        assert difference.first == tuple(expected.nonzero()[0].tolist())
        assert difference.largest == INF
        assert found.nan == (0, 1)


def test_the_report_does_not_depend_on_the_workers():
    torch.manual_seed(6)
    one = {f"t{at}": torch.randn(64, 64) for at in range(40)}
    other = {name: tensor + 1e-3 * torch.randn(64, 64) for name, tensor in one.items()}
    reports = [compare(of(**one), of(**other), workers=workers).to_json() for workers in (1, 2, 4)]
    assert reports[0] == reports[1] == reports[2]
    assert reports[0]["counts"]["values"] == 40


@given(at=st.integers(0, 299), one=st.floats(width=32), other=st.floats(width=32), exact=st.booleans())
def test_any_two_floats(at, one, other, exact):
    first, second = torch.zeros(300), torch.zeros(300)
    first[at], second[at] = one, other
    packed = struct.pack("<f", first[at].item()), struct.pack("<f", second[at].item())
    if exact:
        same = first[at].view(torch.int32) == second[at].view(torch.int32)
    elif math.isfinite(one) and math.isfinite(other):
        same = abs(one - other) <= 1e-6
    else:
        same = (one == other) or (math.isnan(one) and math.isnan(other))
    found = compared(first, second, exact=exact)
    assert found.same == bool(same), packed
    if not same:
        assert found.differences[0].first == (at,)


def test_tensors_of_nothing_and_of_one_element():
    assert compare(
        of(a=torch.empty(0, 3), b=torch.tensor(2.0)), of(a=torch.empty(0, 3), b=torch.tensor(2.0))
    ).same
    assert differing(torch.tensor(2.0), torch.tensor(3.0)).first == ()
    assert compare(of(), of()).same


def test_a_budget_that_is_too_small_is_refused_with_the_least():
    with pytest.raises(BudgetError, match="at least") as error:
        compare(of(x=torch.ones(5)), of(x=torch.ones(5)), max_ram=1 << 20)
    assert "--max-ram" in error.value.hint


def test_progress_reaches_all_bytes():
    seen = []
    tensors = {f"t{at}": torch.ones(1000) for at in range(5)}
    compare(of(**tensors), of(**tensors), workers=2, on_bytes=lambda *event: seen.append(event))
    assert sum(count for count, _, _ in seen) == 20_000
    assert {total for _, total, _ in seen} == {20_000}


def test_an_error_of_a_worker_ends_the_comparison():
    class Broken:
        name, size = "broken", 400

        def read_into(self, offset, buffer):
            raise OSError("gone")

    from lazymerge.files.dtype import DTYPES
    from lazymerge.files.region import Region
    from lazymerge.gather import of_region

    broken = of_region(Region(Broken(), 0, DTYPES["float32"], (100,), (1,)))
    one = Checkpoint({"a": broken, "b": in_memory(torch.ones(100))}, "test")
    with pytest.raises(OSError, match="gone"):
        compare(one, of(a=torch.ones(100), b=torch.ones(100)), workers=4)
