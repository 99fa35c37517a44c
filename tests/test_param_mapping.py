"""`--param-mapping`: its arguments and files, and which names go where."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazymerge.conversions.megatron.mapping import apply_mapping, parse_mapping
from lazymerge.errors import PlanError

NAMES = [f"decoder.layers.{layer}.{kind}.weight" for layer in range(12) for kind in ("x", "y")]


def test_pairs_and_files_are_taken_in_order(tmp_path: Path):
    lines = tmp_path / "lines.txt"
    lines.write_text("# what the table lacks\n\na.b:c.d   # one\n  e.{}.f : g.{}\nleft.out:\n")
    as_json = tmp_path / "map.json"
    as_json.write_text('{"h": "i", "j.{}": ""}')
    assert parse_mapping(["first:second", str(lines), str(as_json), "x:"]) == [
        ("first", "second"),
        ("a.b", "c.d"),
        ("e.{}.f", "g.{}"),
        ("left.out", ""),
        ("h", "i"),
        ("j.{}", ""),
        ("x", ""),
    ]
    unnamed = tmp_path / "map"
    unnamed.write_text('{\n "{}.a": "b.{}"}')
    assert parse_mapping([str(unnamed)]) == [("{}.a", "b.{}")]
    unnamed.write_text("{}.a:b.{}")
    assert parse_mapping([str(unnamed)]) == [("{}.a", "b.{}")]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("nothing", "neither OLD:NEW nor a file"),
        ("", "neither OLD:NEW nor a file"),
        (":new", "no name before the colon"),
        ("a:b:c", "more than one colon"),
        ("a.{}:b.{}.{}", "2 groups"),
        ("x" * 5000, "neither"),
        ("a\0b", "neither"),
    ],
)
def test_a_faulty_argument_is_refused(argument, problem):
    with pytest.raises(PlanError, match=problem):
        parse_mapping([argument])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"a:b\nc", "line 2"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.json", b"{", "malformed"),
        ("a.json", b"[1]", "expected a JSON object"),
        ("a.json", b'{"a": 1}', "expected a JSON object"),
        ("a.json", b'{"a": {"b": "c"}}', "expected a JSON object"),
        ("a.json", b"[" * 100_000, "malformed"),
        ("a.json", b'"text"', "expected a JSON object"),
        ("a.json", b'{"": "x"}', "no name before the colon"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path: Path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PlanError, match=problem) as refusal:
        parse_mapping([str(tmp_path / name)])
    assert name in str(refusal.value)


def test_a_file_too_large_for_names_is_not_read(tmp_path: Path):
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(PlanError, match="larger than"):
        parse_mapping([str(tmp_path / "large.txt")])


def test_a_group_is_one_part_of_a_name():
    new, left_out = apply_mapping([("decoder.{}.{}.x.weight", "{}/{}"), ("decoder.layers.1.y.{}", "")], NAMES)
    assert new == {f"decoder.layers.{layer}.x.weight": f"layers/{layer}" for layer in range(12)}
    assert list(left_out) == ["decoder.layers.1.y.weight"]
    with pytest.raises(PlanError, match="fits none of 24"):
        apply_mapping([("decoder.{}.weight", "{}")], NAMES)


def test_the_first_that_fits_is_taken():
    mapping = [("decoder.layers.3.x.weight", "three"), ("decoder.layers.{}.x.weight", "n{}")]
    new, _ = apply_mapping(mapping, NAMES)
    assert new["decoder.layers.3.x.weight"] == "three" and new["decoder.layers.11.x.weight"] == "n11"
    with pytest.raises(PlanError, match="an earlier one has left"):
        apply_mapping([*mapping, ("decoder.layers.3.x.weight", "again")], NAMES)


def test_what_looks_like_a_pattern_of_another_kind_is_a_name():
    new, _ = apply_mapping([("a.*[0]+", "b")], ["a.*[0]+", "a.x0"])
    assert new == {"a.*[0]+": "b"}


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(PlanError, match=r"decoder.layers.0.x.weight and decoder.layers.1.x.weight both"):
        apply_mapping([("decoder.layers.{}.x.weight", "one")], NAMES)


def test_a_mapping_that_fits_nothing_names_the_nearest():
    with pytest.raises(PlanError, match=r"decoder\.layers\.7\.x\.weight"):
        apply_mapping([("decoder.layers.7.x.weights", "new")], NAMES)


@pytest.mark.parametrize("name", ["map.txt", "map.json"])
def test_a_mark_before_the_first_name_is_none_of_it(tmp_path: Path, name):
    """As editors of Windows write UTF-8."""
    text = '{"a.b": "c.d"}' if name.endswith("json") else "a.b:c.d\n"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert parse_mapping([str(tmp_path / name)]) == [("a.b", "c.d")]
