"""Lazy tensors against eager ones on the same data: random chains, bit for bit."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazymerge
from lazymerge import compute, elements
from lazymerge.elements import in_memory
from lazymerge.errors import PlanError
from lazymerge.gather import cat
from lazymerge.plan import make_plan
from lazymerge.tensor import LazyTensor


def lazy(tensor: torch.Tensor, parts: int = 2) -> LazyTensor:
    """The tensor, lazily, as shards along its first dimension."""
    if not tensor.dim():
        return LazyTensor(in_memory(tensor))
    return LazyTensor(cat([in_memory(part) for part in tensor.chunk(parts)], 0))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(elements.raw_bytes(tensor))


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if expected.numel():  # strides that are ever stepped by
        pairs = zip(result.stride(), expected.stride(), expected.shape, strict=True)
        assert all(mine == torchs for mine, torchs, size in pairs if size > 1)
    real = result.materialize() if isinstance(result, LazyTensor) else result
    assert bits(real) == bits(expected)


OPERATIONS = {
    "narrow": lambda x, d: x.narrow(0, d(0, x.shape[0] - 1), 1) if x.dim() else x,
    "slice": lambda x, d: x[:: d(1, 3)] if x.dim() else x,
    "slice last": lambda x, d: x[..., d(0, 2) :: d(1, 2)] if x.dim() else x,
    "select": lambda x, d: x.select(d(0, x.dim() - 1), -1) if x.dim() and 0 not in x.shape else x,
    "index_select": lambda x, d: (
        x.index_select(0, torch.tensor([d(0, len(x) - 1) for _ in "abc"])) if x.dim() and len(x) else x
    ),
    "reshape": lambda x, d: x.reshape(-1) if d(0, 1) else x.reshape(1, -1, 1),
    "flatten": lambda x, d: x.flatten(),
    "unflatten": lambda x, d: x.unflatten(0, (-1, 1)) if x.dim() and x.shape[0] else x,
    "permute": lambda x, d: x.permute(*reversed(range(x.dim()))) if x.dim() else x,
    "transpose": lambda x, d: x.transpose(0, -1) if x.dim() else x,
    "t": lambda x, d: x.t() if x.dim() <= 2 else x,
    "cat": lambda x, d: torch.cat([x, x], d(0, x.dim() - 1)) if x.dim() else x,
    "cat real": lambda x, d: torch.cat([x, torch.ones(x.shape, dtype=x.dtype)], 0) if x.dim() else x,
    "stack": lambda x, d: torch.stack([x, x], d(0, x.dim())),
    "split": lambda x, d: x.split(d(1, 3), 0)[-1] if x.dim() and x.shape[0] else x,
    "split sizes": lambda x, d: x.split([1, x.shape[0] - 1], 0)[1] if x.dim() and x.shape[0] else x,
    "chunk": lambda x, d: x.chunk(d(1, 3), 0)[0] if x.dim() and x.shape[0] else x,
    "unbind": lambda x, d: x.unbind(0)[0] if x.dim() and x.shape[0] else x,
    "squeeze": lambda x, d: x.squeeze(),
    "unsqueeze": lambda x, d: x.unsqueeze(d(0, x.dim())),
    "expand": lambda x, d: x.expand(2, *x.shape),
    "clone": lambda x, d: x.clone(),
    "contiguous": lambda x, d: x.contiguous(),
    "detach": lambda x, d: x.detach(),
    "to": lambda x, d: x.to([torch.float32, torch.bfloat16, torch.float16, torch.float64][d(0, 3)]),
    "add": lambda x, d: x + x,
    "add alpha": lambda x, d: torch.add(x, x, alpha=2),
    "add scalar": lambda x, d: x + 1,
    "add row": lambda x, d: x + x[:1] if x.dim() else x,
    "sub": lambda x, d: x - torch.ones((), dtype=x.dtype),
    "mul": lambda x, d: x * 0.5,
    "matmul": lambda x, d: x @ x.t() if x.dim() == 2 else x,
    "sum": lambda x, d: x.sum(d(0, x.dim() - 1), keepdim=bool(d(0, 1))) if x.dim() else x.sum(),
    "sum all": lambda x, d: x.sum(),
    "norm": lambda x, d: torch.linalg.norm(x.float(), dim=-1, keepdim=True) if x.dim() else x,
    "other": lambda x, d: x.roll(1),
}


def replaying(numbers: list[int]) -> Callable[[int, int], int]:
    """The same draws once more."""
    remaining = iter(numbers)
    return lambda low, high: next(remaining)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_chains_are_bit_for_bit_what_eager_torch_says(data):
    """Values are small integers, so that sums and products are exact in whatever order they are made."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32]))
    eager = (torch.arange(math.prod(shape)) % 5 - 2).reshape(shape).to(dtype)
    recorded: torch.Tensor = lazy(eager, data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 6))):
        if eager.numel() > 2000:
            break
        name = data.draw(st.sampled_from(list(OPERATIONS)))
        numbers: list[int] = []

        def draw(low: int, high: int, numbers: list[int] = numbers) -> int:
            numbers.append(data.draw(st.integers(low, max(low, high))))
            return numbers[-1]

        try:
            expected = OPERATIONS[name](eager, draw)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                OPERATIONS[name](recorded, replaying(numbers))
            return
        recorded = OPERATIONS[name](recorded, replaying(numbers))
        eager = expected
        assert_same(recorded, eager)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "other"])
def test_none_of_them_reads(name, monkeypatch):
    """What is recorded is recorded: no operand is materialised on the way."""
    monkeypatch.setattr(LazyTensor, "materialize", lambda self: pytest.fail(f"{name} reads"))
    x = lazy(torch.arange(24.0).reshape(4, 6))
    result = OPERATIONS[name](x, lambda low, high: low)
    assert isinstance(result, LazyTensor)


def test_another_operator_reads_and_says_so_once(caplog):
    x = lazy(torch.arange(6.0))
    with caplog.at_level(logging.INFO, "lazymerge"):
        for _ in range(2):
            assert torch.equal(x.cumsum(0), torch.arange(6.0).cumsum(0))
    assert [record.message for record in caplog.records if "cumsum" in record.message] == [
        "aten.cumsum.default has no lazy form: its operands are read into memory"
    ]


def test_eager_errors_stay_errors():
    x = lazy(torch.zeros(4, 6))
    with pytest.raises(RuntimeError, match="size"):
        x.t().view(24)
    with pytest.raises(RuntimeError, match="invalid"):
        x.view(5, 5)
    with pytest.raises(IndexError):
        x.select(0, 4)
    with pytest.raises(IndexError):
        x.index_select(0, torch.tensor([4]))


def test_changing_it_in_place_is_refused():
    x = lazy(torch.zeros(4))
    for change in (lambda: x.add_(1), lambda: x.zero_(), lambda: x.copy_(torch.ones(4))):
        with pytest.raises(TypeError, match="in place"):
            change()


@pytest.mark.parametrize(
    "like", [lambda x: x.t(), lambda x: x[2:], lambda x: x[:, :3], lambda x: x], ids="tsco"
)
@pytest.mark.parametrize(
    "reach",
    [
        lambda x: x.as_strided((2, 2), (1, 2)),
        lambda x: x.as_strided((2, 2), (1, 2), 0),
        lambda x: torch.as_strided_copy(x, (2, 2), (1, 2)),
        lambda x: torch.as_strided_copy(x, (2, 2), (1, 2), out=torch.empty(2, 2)),
        lambda x: torch.as_strided_scatter(x, torch.ones(2, 2), (2, 2), (1, 2)),
    ],
    ids=["view", "offset", "copy", "out", "scatter"],
)
def test_what_reaches_for_the_storage_is_refused(like, reach):
    """Its values depend on where the elements are in memory, and these are nowhere."""
    with pytest.raises(TypeError, match=r"as_strided.*no storage.*materialize\(\)"):
        reach(like(lazy(torch.arange(48.0).view(8, 6))))


def test_a_lazy_part_may_be_put_into_a_real_storage():
    real, part = torch.zeros(6, 8), torch.arange(4.0).view(2, 2)
    result = torch.as_strided_scatter(real, lazy(part).t(), (2, 2), (1, 8))
    assert torch.equal(result, torch.as_strided_scatter(real, part.t(), (2, 2), (1, 8)))


def test_copy_into_a_real_tensor_reads_a_block_at_a_time(monkeypatch):
    monkeypatch.setattr("lazymerge.tensor.COPY_BLOCK", 64)
    monkeypatch.setattr(LazyTensor, "materialize", lambda self: pytest.fail("read whole"))
    truth = torch.randn(8, 16)
    sizes = []
    read = compute.read

    def watched(gather, window):
        sizes.append(window.numel)
        return read(gather, window)

    monkeypatch.setattr(compute, "read", watched)
    real = torch.empty(8, 16)
    real.copy_(lazy(truth))
    assert torch.equal(real, truth)
    assert max(sizes) * 4 <= 64


def test_copy_casts_and_broadcasts_like_torch():
    real = torch.empty(3, 4, dtype=torch.bfloat16)
    real.copy_(lazy(torch.arange(4.0)))
    assert torch.equal(real, torch.arange(4.0).expand(3, 4).to(torch.bfloat16))


def test_load_state_dict_takes_lazy_tensors():
    model = torch.nn.Linear(6, 4)
    weight, bias = torch.randn(4, 6), torch.randn(4)
    model.load_state_dict({"weight": lazy(weight), "bias": lazy(bias)})
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)


def test_what_reaches_for_the_data_gets_it():
    truth = torch.arange(6.0).reshape(2, 3)
    x = lazy(truth)
    assert (x.numpy() == truth.numpy()).all()
    assert x.tolist() == truth.tolist()
    assert x[0, 1].item() == 1.0
    assert repr(x) == "LazyTensor(shape=(2, 3), dtype=torch.float32)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_lazy_and_shares_the_gather(copied, monkeypatch):
    truth = torch.arange(6.0).reshape(2, 3)
    x = lazy(truth).t()
    with monkeypatch.context() as patch:
        patch.setattr(LazyTensor, "materialize", lambda self: pytest.fail("read"))
        made = copied({"x": x, "again": x})["x"]
    assert made.lazy_gather is x.lazy_gather
    assert_same(made, truth.t())


@pytest.mark.parametrize("dump", [pickle.dumps, lambda x: torch.save({"x": x}, io.BytesIO())])
def test_it_cannot_be_pickled(dump):
    with pytest.raises(TypeError, match=r"materialize\(\).*open the checkpoint again.*plan as JSON"):
        dump(lazy(torch.ones(3)))


@pytest.mark.parametrize(
    "product",
    [
        lambda v, m: v @ m,
        torch.matmul,
        lambda v, m: m.t() @ v,
        lambda v, m: v @ torch.stack([m, m]),
        lambda v, m: torch.stack([m, m]).transpose(1, 2) @ v,
        lambda v, m: torch.nn.functional.linear(v, m.t()),
        lambda v, m: v @ v,
    ],
    ids=["v @ M", "matmul", "M @ v", "v @ MM", "MM @ v", "linear", "v @ v"],
)
@pytest.mark.parametrize("kinds", ["ll", "lr", "rl"])
def test_products_of_vectors(product, kinds):
    """Small integers: exact however they are summed."""
    operands = [(torch.arange(6.0) - 2), (torch.arange(24.0) % 5).reshape(6, 4)]
    mixed = [lazy(x) if kind == "l" else x for x, kind in zip(operands, kinds, strict=True)]
    assert_same(product(*mixed), product(*operands))


def test_the_product_of_a_vector_is_not_read_before_it_is_asked_for(monkeypatch):
    v, m = torch.arange(6.0), torch.arange(24.0).reshape(6, 4)
    with monkeypatch.context() as patch:
        patch.setattr(LazyTensor, "materialize", lambda self: pytest.fail("read"))
        product = lazy(v) @ lazy(m)
        row = product[1:] + 1
    assert product.shape == (4,)
    assert_same(row, (v @ m)[1:] + 1)


def test_squeezing_in_place_is_torchs_own():
    for shape, dim in [((1, 4), 0), ((4, 1), -1), ((2, 3), 0), ((1,), 0)]:
        eager = torch.arange(float(math.prod(shape))).reshape(shape)
        x = lazy(eager.clone())
        kept, made = x[:], x.squeeze_(dim)
        assert made is x
        assert_same(kept, eager)
        assert_same(made, eager.squeeze_(dim))


def test_squeezing_a_dimension_that_is_not_there():
    x = lazy(torch.zeros(1, 3))
    with pytest.raises(IndexError):
        x.squeeze_(2)
    assert x.shape == x.lazy_gather.shape == (1, 3)


def test_what_the_page_says_of_data():
    truth = torch.arange(4.0)
    for write in (lambda real, x: real.data.copy_(x), lambda real, x: setattr(real, "data", x.materialize())):
        real = torch.nn.Parameter(torch.zeros(4))
        write(real, lazy(truth))
        assert torch.equal(real, truth)


def test_blocks_cover_it():
    truth = torch.arange(30.0).reshape(5, 6)
    result = torch.zeros(5, 6)
    for index, block in lazy(truth).blocks(48):
        assert block.numel() * 4 <= 48
        result[index] = block
    assert torch.equal(result, truth)


def test_a_product_does_not_depend_on_the_block_that_is_read():
    a, b = torch.randn(64, 300), torch.randn(300, 200)
    product = lazy(a) @ b
    whole = product.materialize()
    for _, block in product.blocks(200 * 4):
        assert torch.equal(block, whole[: block.shape[0]])
        whole = whole[block.shape[0] :]


def test_mixed_dtypes_are_promoted_as_torch_promotes_them():
    x, y = torch.ones(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2)
    assert_same(torch.cat([lazy(x), lazy(y)]), torch.cat([x, y]))
    assert_same(lazy(x) + y, x + y)


def test_every_dtype_can_be_read_back():
    for name in ("bool", "uint8", "int64", "float8_e4m3fn", "float16", "complex64", "complex128", "uint16"):
        raw = torch.randint(0, 2, (4, 16), dtype=torch.uint8)
        truth = raw.bool() if name == "bool" else raw.view(getattr(torch, name))
        assert_same(lazy(truth, 1), truth)


def test_copies_that_do_not_fit_are_torchs_errors():
    with pytest.raises(RuntimeError):
        torch.empty(3, 4).copy_(lazy(torch.zeros(5, 4)))
    with pytest.raises(RuntimeError):
        torch.empty(4).copy_(lazy(torch.zeros(5, 4)))


def test_real_tensors_can_be_changed_with_lazy_ones():
    real, truth = torch.ones(4), torch.arange(4.0)
    real.add_(lazy(truth))
    real[torch.tensor([0, 1])] = lazy(truth)[:2]
    real += lazy(truth)
    torch.mul(lazy(truth), 2, out=(doubled := torch.empty(4)))
    assert type(real) is torch.Tensor
    assert torch.equal(real, torch.tensor([0.0, 2.0, 5.0, 7.0]))
    assert torch.equal(doubled, truth * 2)


def test_what_is_done_to_an_operand_later_changes_nothing():
    operand = torch.ones(4)
    total, joined = lazy(torch.zeros(4)) + operand, torch.cat([lazy(torch.zeros(4)), operand])
    operand.fill_(9)
    assert torch.equal(total.materialize(), torch.ones(4))
    assert torch.equal(joined.materialize(), torch.tensor([0.0] * 4 + [1.0] * 4))


def test_what_would_change_it_behind_its_back_is_refused():
    x = lazy(torch.zeros(4))
    for change in (lambda: setattr(x, "data", torch.ones(4)), x.share_memory_):
        with pytest.raises(TypeError):
            change()
    model = torch.nn.Linear(4, 2, bias=False)
    model.load_state_dict({"weight": lazy(torch.ones(2, 4))}, assign=True)
    with pytest.raises(TypeError, match="materialize"):
        model.to(torch.bfloat16)


def test_the_dtype_of_another_lazy_tensor():
    x, like = lazy(torch.ones(4)), lazy(torch.zeros(1, dtype=torch.bfloat16))
    for result in (x.to(like), x.type_as(like)):
        assert_same(result, torch.ones(4, dtype=torch.bfloat16))


def test_a_product_over_several_blocks_of_rows():
    a, b = torch.randn(4096, 512), torch.randn(512, 512)
    product = lazy(a) @ b  # 8 MB of operand, 8 MB of result: computed 1024 rows at a time
    whole = product.materialize()
    torch.testing.assert_close(whole, a @ b)
    for rows in (1, 1000, 1500):
        _, (_, block), *_ = islice(product.blocks(rows * 512 * 4), 2)
        assert torch.equal(block, whole[rows : 2 * rows])


def test_casts_of_casts():
    """Each has its own memory while both are at work."""
    truth = torch.randn(3000, 7)
    once = lazy(truth).to(torch.float64)
    assert_same(once.to(torch.float32).to(torch.bfloat16), truth.to(torch.bfloat16))
    assert_same(once.to(torch.float16) + once.to(torch.float16), truth.to(torch.float16) * 2)


# ---- many steps --------------------------------------------------------------------------------------------


STEPS = {
    "add": lambda x: x + 1,
    "product": lambda x: (x.t() @ x).t(),
    "cast": lambda x: x.to(torch.float64 if x.dtype == torch.float32 else torch.float32).t(),
    "bmm": lambda x: torch.bmm(x[None], x[None])[0],
    "views": lambda x: x.reshape(2, 8).t().reshape(4, 4),
    "cat and slice": lambda x: torch.cat([x, x[:1]])[1:],
    "whole": lambda x: x + x.sum(),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_too_many_steps_are_refused_before_python_refuses_them(name):
    """As many as are taken can be read and planned; what is one more is an error that says what to do."""
    x: torch.Tensor = lazy(torch.zeros(4, 4))
    eager = torch.zeros(4, 4)
    with suppress(PlanError):
        for _ in range(2000):
            x, eager = STEPS[name](x), STEPS[name](eager)
        pytest.fail("never refused")
    assert_same(x, eager)
    make_plan({"x": x.lazy_gather})
    with pytest.raises(PlanError, match=r"too many steps(.|\n)*materialize\(\)"):
        STEPS[name](x)
    real = x.materialize()
    assert_same(STEPS[name](lazy(real)), STEPS[name](real))


def test_a_tensor_that_grows_by_steps_is_not_deep():
    x: torch.Tensor = lazy(torch.zeros(1, 2))
    for i in range(1500):
        x = torch.cat([x, lazy(torch.full((1, 2), float(i)))])
    assert_same(x[1:], torch.arange(1500.0)[:, None].expand(-1, 2).contiguous())


def test_what_is_an_operand_twice_is_read_and_counted_once(tmp_path):
    torch.save({"x": torch.ones(64, 64)}, tmp_path / "model.pt")
    x = lazymerge.open(tmp_path / "model.pt")["x"]
    for _ in range(60):
        x = x + x
    (tensor,) = make_plan({"x": x.lazy_gather}).tensors
    assert tensor.reads == 64 * 64 * 4
    assert tensor.computed[0].working_set(4096) < 1 << 20
    assert torch.equal(x.materialize(), torch.full((64, 64), 2.0**60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("average", [False, True])
def test_a_sum_of_many_parts_is_added_in_their_order(dtype, average):
    if average and dtype == torch.int64:
        pytest.skip("no average of integers")
    parts = [torch.randn(5, 7).mul(100).to(dtype) for _ in range(512)]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part.to(wide)
    if average:
        expected = expected / len(parts)
    summed = compute.total("w", [in_memory(part) for part in parts], average=average)
    assert_same(LazyTensor(summed), expected.to(dtype))
    held = compute.working_set(summed, 1 << 20)
    assert held < 5 << 20
