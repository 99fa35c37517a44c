"""Megatron's parameters under the names and in the layouts of the hub: a table for each model family."""
