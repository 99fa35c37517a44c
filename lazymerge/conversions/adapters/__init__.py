"""Adapters: read from PEFT's folders, taken out of trainers' checkpoints, folded into the base."""
