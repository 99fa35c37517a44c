"""Patterns for names of modules, against Python's own regular expressions and PEFT's use of them."""

from __future__ import annotations

import re

import pytest

from lazymerge.conversions.adapters.patterns import Pattern

NAMES = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.k_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.mlp.experts.12.down_proj",
    "h.0.attn.c_attn",
    "xq_proj",
    "model.layers",
    "",
]
PATTERNS = [
    "q_proj",
    "proj",
    "(q|k)_proj",
    r"layers\.1\.mlp\..*",
    "^model.layers.0.self_attn.q_proj",
    r".*\.(10|1)\..*proj",
    r"model\.layers\.\d+\.self_attn\.[qk]_proj",
    r"layers.(?:0|1|[2-9]\d?).*",
    "[a-z0-9_.]*",
    "[^q]_proj",
    r"layers\.\d{2}\.self_attn\..+?",
    r"layers\.\d{1,2}\.mlp\.(experts\.\d+\.)?(up|down)_proj",
    "q_proj|c_attn$",
    "",
    r"h\.0\.attn\.c_attn",
    r"[\w.]{3,}proj",
    "x?q_proj",
    ".*.*.*.*proj",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_what_re_matches(pattern: str) -> None:
    found = Pattern(pattern)
    for name in NAMES:
        assert found.matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), name


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(ab)*", "(ab){2}", "q_proj(", "a)", "*a", "[a", "(?=a)", r"(a)\1", "a{2000}", "a" * 2000],
)
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of whoever is asked to match it
        Pattern(pattern)


@pytest.mark.parametrize("pattern", ["[a-z0-9_.]?" * 80 + "X", "(.|.)" * 150 + "X", ".*" * 400 + "X"])
def test_no_pattern_takes_long(pattern: str) -> None:
    """By Python's own matcher these take longer than anybody waits."""
    assert not Pattern(pattern).matches("model.layers.10.self_attn.k_proj" * 8)
