"""What a user would pick instead of kvslim's methods, as caches with the same interface and the same byte count."""

from kvslim.baselines.per_token import IntegerCache, RotatedCache

__all__ = ["IntegerCache", "RotatedCache"]
