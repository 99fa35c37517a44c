"""Checkpoint makers: the real frameworks write tiny checkpoints, and hand back what went in.

`ranks` runs a function in N processes, `models` builds and `layout` places what a checkpoint folder
holds, `fsdp` and `fsdp1` shard models, `dtensors` shards single tensors
(`odd_tensors` has collections of them), `old_torch` rewrites a file
as an earlier torch laid it out, and `fixtures` makes each checkpoint once per session.
"""
