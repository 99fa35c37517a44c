"""What is kept of what transformers said: used again, never trusted, never in the way."""

from __future__ import annotations

import json

import pytest

from lazymerge.conversions import answers, architecture

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ANSWER = {
    "class_name": "LlamaForCausalLM",
    "shapes": {"model.norm.weight": [8]},
    "tied": {},
    "optional": [],
    "ignored": [],
    "swappable": [],
    "parts": {},
}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The questions that are asked of transformers, which answers at once; and a cache of its own."""
    monkeypatch.setenv("LAZYMERGE_CACHE", str(tmp_path / "cache"))
    questions = []
    monkeypatch.setattr(
        architecture, "_ask", lambda request: questions.append(request) or {"architecture": ANSWER}
    )
    return questions


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
