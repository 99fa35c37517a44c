"""The figures of docs/benchmarks.md: `python -m benches [NAME ...]` measures them on this machine.

`checkpoints` writes what is merged, `measure` runs a command in a fresh process and watches its memory,
`roads` are the ways from a source to a result that are compared, `merging`, `planning` and `starting`
are the benches, and `page` turns results.json into the page.
"""
