"""Tests of lazymerge."""
