"""Shardwright plans the sharding of JAX programs on TPU slices."""

from shardwright.errors import DoesNotFitError, InputError, ShardwrightError

__all__ = ["DoesNotFitError", "InputError", "ShardwrightError"]
