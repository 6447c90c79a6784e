"""Checkpoint to pack. Uses mlx-lm's own loader to understand a checkpoint; never runs its code."""
