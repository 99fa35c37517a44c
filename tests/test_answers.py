"""What is kept of what transformers said: used again, never trusted, never in the way."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from lazymerge.checkpoint import Checkpoint
from lazymerge.conversions import answers, architecture
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.files.dtype import DTYPES
from lazymerge.gather import Constant, Shards

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ANSWER = {
    "class_name": "LlamaForCausalLM",
    "shapes": {"model.norm.weight": [8]},
    "tied": {},
    "wide": {},
    "optional": [],
    "ignored": [],
    "swappable": [],
    "parts": {},
    "defaults": {"model_type": "llama", "hidden_size": 8},
}
FIELDS = [[{"field": "hidden_size", "is": 8, "fits": 9}]]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The questions that are asked of transformers, which answers at once; and a cache of its own."""
    monkeypatch.setenv("LAZYMERGE_CACHE", str(tmp_path / "cache"))
    questions = []

    def ask(request):
        questions.append(request)
        return {"fields": FIELDS} if "found" in request else {"architecture": ANSWER}

    monkeypatch.setattr(architecture, "_ask", ask)
    return questions


def test_answers_of_a_version_under_work_are_not_kept(tmp_path, asked, monkeypatch):
    """Its name stays the same while its code changes."""
    monkeypatch.setattr(answers, "version", lambda _: "5.25.0.dev0")
    for _ in range(2):
        assert architecture.expected(CONFIG) is not None
    assert len(asked) == 2
    assert kept(tmp_path) == []


def kept(tmp_path):
    return sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_question_is_asked_once(asked, tmp_path):
    first, second = architecture.expected(CONFIG), architecture.expected(dict(CONFIG))
    assert first == second
    assert first.shapes == {"model.norm.weight": (8,)}
    assert len(asked) == len(kept(tmp_path)) == 1


@pytest.mark.parametrize("change", [{"hidden_size": 9}, {"tie_word_embeddings": True}])
def test_another_config_is_another_question(asked, change):
    architecture.expected(CONFIG)
    architecture.expected({**CONFIG, **change})
    assert len(asked) == 2


def test_another_transformers_is_another_question(asked, monkeypatch):
    architecture.expected(CONFIG)
    monkeypatch.setattr(answers, "version", lambda name: "6.0")
    architecture.expected(CONFIG)
    assert len(asked) == 2


def test_trusted_code_is_run_each_time(asked, tmp_path):
    for _ in range(2):
        architecture.expected(CONFIG, code=tmp_path)
    assert len(asked) == 2


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "[1]", '{"shapes": 1}', json.dumps({"a": 1})])
def test_a_damaged_answer_is_asked_again(asked, tmp_path, content):
    architecture.expected(CONFIG)
    (path,) = kept(tmp_path)
    path.write_text(content)
    assert architecture.expected(CONFIG).shapes == {"model.norm.weight": (8,)}
    assert len(asked) == 2


def test_a_flipped_bit_is_damage_though_it_is_json(asked, tmp_path):
    architecture.expected(CONFIG)
    (path,) = kept(tmp_path)
    path.write_text(path.read_text().replace("[8]", "[9]"))
    assert architecture.expected(CONFIG).shapes == {"model.norm.weight": (8,)}
    assert len(asked) == 2


@pytest.mark.parametrize("mode", [0o602, 0o620])
def test_what_others_may_write_is_not_read(asked, tmp_path, mode):
    architecture.expected(CONFIG)
    (path,) = kept(tmp_path)
    path.chmod(mode)
    architecture.expected(CONFIG)
    assert len(asked) == 2


def test_what_somebody_else_put_there_is_not_read(asked, tmp_path, monkeypatch):
    architecture.expected(CONFIG)
    monkeypatch.setattr(answers.os, "geteuid", lambda: os.getuid() + 1)
    architecture.expected(CONFIG)
    assert len(asked) == 2


def test_the_answer_of_other_code_is_not_taken(asked, monkeypatch):
    architecture.expected(CONFIG)
    monkeypatch.setattr(answers, "_digest_of_code", lambda: "other")
    architecture.expected(CONFIG)
    assert len(asked) == 2


def put(path, content):
    """Another answer in the file, as if it had been kept."""
    path.write_bytes(answers._checksum(content.encode()) + b"\n" + content.encode())


def changed(**parts):
    return json.dumps({**ANSWER, **parts})


@pytest.mark.parametrize(
    "content",
    [
        changed(ignored=["("]),
        changed(optional=["a{99999999999}"]),
        changed(swappable=["a", "(?i)b"]),  # fine by itself, but not with others
        changed(ignored="abc"),
        changed(ignored=[1]),
        changed(tied=[]),
        changed(tied={"a": 1}),
        changed(tied={"a": "a"}),
        changed(tied={"a": "b", "b": "c", "c": "b"}),
        changed(wide=[]),
        changed(wide={"bfloat16": "a"}),
        changed(parts=[]),
        changed(parts={"visual": "a"}),
        changed(shapes={}),
        changed(shapes={"model.norm.weight": ["a"]}),
        changed(shapes={"model.norm.weight": [-1]}),
        changed(shapes={"model.norm.weight": [True]}),
        changed(shapes={"model.norm.weight": 8}),
        changed(class_name=None),
        changed(defaults=None),
        json.dumps(
            {key: value for key, value in ANSWER.items() if key != "defaults"}
        ),  # an older lazymerge's
    ],
)
def test_an_answer_that_is_none_is_asked_again_and_replaced(asked, tmp_path, content):
    architecture.expected(CONFIG)
    (path,) = kept(tmp_path)
    put(path, content)
    for _ in range(2):
        assert architecture.expected(CONFIG).shapes == {"model.norm.weight": (8,)}
    assert len(asked) == 2


def test_defaults_are_kept_too(asked):
    first, second = architecture.expected(CONFIG), architecture.expected(CONFIG)
    assert first.defaults == second.defaults == {"model_type": "llama", "hidden_size": 8}


def refused(architecture_, **shapes):
    gathers = {name: Shards(shape, DTYPES["float32"], Constant([])) for name, shape in shapes.items()}
    with pytest.raises(InconsistentCheckpoint) as caught:
        architecture.check(Checkpoint(gathers, "made"), architecture_)
    return caught.value.hint


def test_what_would_mend_a_contradiction_is_asked_once_a_checkpoint(asked):
    found = architecture.expected(CONFIG)
    nine, ten = ({"model.norm.weight": (size,)} for size in (9, 10))
    first = refused(found, **nine)
    assert "hidden_size = 9 would fit, it says 8" in first
    assert refused(found, **nine) == first
    assert [request.get("found") for request in asked] == [None, {"model.norm.weight": [9]}]
    refused(found, **ten)
    assert len(asked) == 3


@pytest.mark.parametrize(
    "content", ["{}", "[[]]", "[{}]", '[[{"field": 1}]]', '[[{"field": "a", "is": 1}]]', json.dumps(ANSWER)]
)
def test_a_damaged_explanation_is_asked_again(asked, tmp_path, content):
    found = architecture.expected(CONFIG)
    (before,) = kept(tmp_path)
    first = refused(found, **{"model.norm.weight": (9,)})
    (path,) = set(kept(tmp_path)) - {before}
    put(path, content)
    assert refused(found, **{"model.norm.weight": (9,)}) == first
    assert len(asked) == 3


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(asked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAZYMERGE_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert architecture.expected(CONFIG).shapes
    assert len(asked) == 2


def test_nothing_is_kept_where_the_user_says_so(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("LAZYMERGE_CACHE", "")
    for _ in range(2):
        architecture.expected(CONFIG)
    assert len(asked) == 2
    assert kept(tmp_path) == []


def test_reading_an_answer_takes_its_own_size_in_memory():
    """Not that of the largest there may be, which a merge under a tight limit has not."""
    answers.remember("question", {"small": 1})
    tracemalloc.start()
    try:
        assert answers.remembered("question") == {"small": 1}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
