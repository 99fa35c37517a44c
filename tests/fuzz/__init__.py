"""Readers fed with what honest files become when bytes of them change: only `LazymergeError` may come out."""
