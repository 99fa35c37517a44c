"""Sums with low-rank products, block by block: torch's bits, whatever the blocks, workers and detours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lazymerge import lowrank
from lazymerge.boxes import Box
from lazymerge.casting import cast
from lazymerge.compute import read
from lazymerge.errors import PlanError
from lazymerge.execute import write_file
from lazymerge.files.dtype import DTYPES
from lazymerge.files.local import LocalFile
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.gather import Gather, of_region
from lazymerge.lowrank import LowRank, Term, add_products
from lazymerge.plan import make_plan
from lazymerge.plan_json import plan_from_json, plan_to_json


def stored(folder: Path, **tensors: torch.Tensor) -> dict[str, Gather]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "in.safetensors")
    return {
        name: of_region(region)
        for name, region in read_safetensors(LocalFile(folder / "in.safetensors")).items()
    }


def matrices(
    rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows + columns + rank)
    return {
        "w": torch.randn(rows, columns).to(dtype),
        "a": torch.randn(rank, columns),
        "b": torch.randn(rows, rank),
    }


def test_a_base_that_is_computed_itself_counts_as_far_as_it_is_read(tmp_path: Path) -> None:
    """A whole grain of rows at least, however small the block."""
    made = stored(tmp_path, **matrices(2000, 4096, 16, torch.bfloat16))
    term, bf16 = Term(made["b"], made["a"], 1.0), DTYPES["bfloat16"]
    wide = cast(made["w"], DTYPES["float32"], "w")
    plain, over = (LowRank(base, (term,), "w", None, False, bf16) for base in (made["w"], wide))
    grain = 32 * 4096  # elements; four bytes of each are read, which are cast from two
    assert over.working_set(4096 * 2) - plain.working_set(4096 * 2) == grain * (4 - 2) + grain * 2


SHAPES = [(8, 8, 2), (40, 24, 8), (33, 500, 16), (700, 4096, 16), (5, 200_000, 4), (2000, 30, 32), (1, 9, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_is_rounded_once(tmp_path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Bit for bit, for ranks in which torch's own product does not depend on how it goes about it."""
    given = matrices(*shape, dtype)
    made = stored(tmp_path, **given)
    result = read(add_products(made["w"], [Term(made["b"], made["a"], 1.5)], "w"))
    expected = given["w"].float() + 1.5 * (given["b"] @ given["a"])
    if min(shape[:2]) > 1:
        assert torch.equal(result, expected.to(dtype))
    torch.testing.assert_close(result, expected.to(dtype))


def test_terms_are_added_from_left_to_right(tmp_path: Path) -> None:
    given = matrices(40, 24, 8)
    made = stored(tmp_path, **given, c=torch.randn(40, 24))
    terms = [Term(made["b"], made["a"], 0.1), Term(made["c"], None, 3.0), Term(made["b"], made["a"], -7.0)]
    product = given["b"] @ given["a"]
    expected = given["w"] + 0.1 * product + 3.0 * load_file(tmp_path / "in.safetensors")["c"] + -7.0 * product
    assert torch.equal(read(add_products(made["w"], terms, "w")), expected)


def test_double_precision_stays(tmp_path: Path) -> None:
    given = {name: tensor.double() / 3 for name, tensor in matrices(40, 24, 8).items()}
    made = stored(tmp_path, **given)
    result = read(add_products(made["w"], [Term(made["b"], made["a"], 0.7)], "w"))
    torch.testing.assert_close(result, given["w"] + 0.7 * (given["b"] @ given["a"]), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("columns", [False, True])
def test_lengths_of_rows_and_columns(tmp_path: Path, columns: bool) -> None:
    given = matrices(3000, 130, 8)
    made = stored(tmp_path, **given, m=torch.rand(130 if columns else 3000) + 0.5)
    gather = add_products(made["w"], [Term(made["b"], made["a"], 1.5)], "w", made["m"], columns=columns)
    total = given["w"] + 1.5 * (given["b"] @ given["a"])
    expected = total / total.norm(dim=0 if columns else 1, keepdim=True)
    wanted = load_file(tmp_path / "in.safetensors")["m"]
    torch.testing.assert_close(read(gather), expected * (wanted if columns else wanted[:, None]))
    assert gather_reads(gather) == sum(each.nbytes for each in made.values()) + columns * made["w"].nbytes


def gather_reads(gather: Gather) -> int:
    (piece,) = gather.pieces()
    assert isinstance(piece.region.source, LowRank)
    return piece.region.source.reads


@pytest.mark.parametrize("rank", [16, 300])
def test_parts_have_the_bits_of_the_whole(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is computed in the grains of the whole; so are a transposed one, and a sum of a sum."""
    monkeypatch.setattr(lowrank, "_GRAIN", 1 << 10)
    made = stored(tmp_path, **matrices(97, 75, rank, torch.bfloat16))
    gather = add_products(made["w"], [Term(made["b"], made["a"], 1.5)], "w")
    whole = read(gather)
    for start, size in [((0, 0), (1, 1)), ((13, 7), (50, 60)), ((96, 74), (1, 1)), ((0, 70), (97, 5))]:
        box = Box(start, size)
        assert torch.equal(read(gather, box), whole[box.slices])
    assert torch.equal(read(gather.permute([1, 0])), whole.T)
    again = add_products(gather, [Term(made["b"], made["a"], -2.0)], "w")
    expected = whole.float() - 2 * read_product(made)
    torch.testing.assert_close(read(again), expected.bfloat16(), rtol=0.01, atol=0.01)
    assert torch.equal(read(again, Box((13, 7), (50, 60))), read(again)[13:63, 7:67])


def read_product(made: dict[str, Gather]) -> torch.Tensor:
    return read(made["b"]) @ read(made["a"])


def test_workers_blocks_and_a_plan_from_json_change_no_bit(tmp_path: Path) -> None:
    tensors = {}
    for name, shape in {"one": (700, 1024, 16), "two": (64, 3000, 70), "three": (2000, 64, 3)}.items():
        folder = tmp_path / name
        folder.mkdir()
        made = stored(folder, **matrices(*shape, torch.bfloat16), m=torch.rand(shape[1]))
        magnitude = made["m"] if name == "two" else None
        terms = [Term(made["b"], made["a"], 0.3), Term(made["b"], made["a"], -1.0)]
        tensors[name] = add_products(made["w"], terms, name, magnitude, columns=True)
    tensors["bias"] = add_products(
        made["m"].view((64, 1)), [Term(made["m"].view((64, 1)), None, 2.0)], "bias"
    ).view((64,))
    plan = make_plan(tensors)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    results = set()
    for each, block, workers in [(plan, 1 << 21, 1), (plan, 1 << 18, 4), (again, 1 << 20, 2)]:
        (file,) = each.files
        out = tmp_path / "out"
        out.write_bytes(bytes(file.size))
        with out.open("r+b") as target:
            write_file(file, target.fileno(), block=block, workers=workers, on_bytes=lambda _: None)
        results.add(out.read_bytes())
    assert len(results) == 1
    written = load_file(tmp_path / "out")
    assert torch.equal(written["bias"], 3 * load_file(tmp_path / "three" / "in.safetensors")["m"])


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    made = stored(tmp_path, **matrices(8, 8, 2))
    data = plan_to_json(make_plan({"w": add_products(made["w"], [Term(made["b"], made["a"], 1.0)], "w")}))
    source = next(each for each in data["sources"] if "lowrank" in each)
    source["terms"][0]["right"]["shape"] = [2, 7]
    with pytest.raises(PlanError, match="no sum of products"):
        plan_from_json(data)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -1e30])
def test_what_becomes_infinite_is_refused(tmp_path: Path, broken: float) -> None:
    given = matrices(8, 8, 2, torch.float16)
    given["a"][1, 3] = broken
    given["b"].abs_()  # so that all that overflows has one sign
    made = stored(tmp_path, **given)
    with pytest.raises(PlanError, match=r"layer\.weight: with the adapter \d+ of its values"):
        read(add_products(made["w"], [Term(made["b"], made["a"], 1.0)], "layer.weight"))


def test_infinities_of_the_base_are_kept(tmp_path: Path) -> None:
    given = matrices(8, 8, 2, torch.bfloat16)
    given["w"][2, 5] = float("-inf")
    made = stored(tmp_path, **given)
    result = read(add_products(made["w"], [Term(made["b"], made["a"], 1.0)], "w"))
    assert torch.isinf(result).nonzero().tolist() == [[2, 5]]


def test_memory_is_that_of_blocks(tmp_path: Path) -> None:
    """100 MB folded in a process of its own: no torch, and what the budget foresees."""
    rows, columns = 12_000, 4096
    made = {"a": torch.randn(16, columns), "b": torch.randn(rows, 16)}
    save_file(made, tmp_path / "ab.safetensors")
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * columns * 2]}}
    )
    with (tmp_path / "w.safetensors").open("wb") as file:  # zeros that take no disk
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + rows * columns * 2)
    script = f"""
import os, sys
from pathlib import Path
from lazymerge.budget import high_water, spend
from lazymerge.execute import write_file
from lazymerge.files.local import LocalFile
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.gather import of_region
from lazymerge.lowrank import Term, add_products
from lazymerge.plan import make_plan
folder = Path({str(tmp_path)!r})
w = of_region(read_safetensors(LocalFile(folder / "w.safetensors"))["w"])
ab = {{k: of_region(v) for k, v in read_safetensors(LocalFile(folder / "ab.safetensors")).items()}}
plan = make_plan({{"w": add_products(w, [Term(ab["b"], ab["a"], 2.0)], "w")}})
spending = spend(None, 2, plan.tensors)
target = os.open(folder / "out", os.O_RDWR | os.O_CREAT)
os.ftruncate(target, plan.files[0].size)
write_file(plan.files[0], target, block=spending.block, workers=2, on_bytes=lambda _: None)
assert "torch" not in sys.modules
print(spending.peak, high_water())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    predicted, peak = map(int, done.stdout.split())
    assert peak <= predicted < 80 * 10**6
    with LocalFile(tmp_path / "out").opened():
        written = read(
            of_region(read_safetensors(LocalFile(tmp_path / "out"))["w"]), Box((11_990, 0), (10, columns))
        )
    assert torch.equal(written, (2 * (made["b"][-10:] @ made["a"])).bfloat16())
