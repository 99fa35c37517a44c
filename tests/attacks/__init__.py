"""Hostile checkpoints: each is refused in two lines, and nothing that it asks for is done."""
