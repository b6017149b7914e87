"""What a user would pick instead of kvslim's methods, as caches with the same interface and the same byte count."""

from kvslim.baselines.fp8 import Float8Cache
from kvslim.baselines.kivi import KiviCache
from kvslim.baselines.kvquant import KvquantCache
from kvslim.baselines.kvtc import KvtcCache
from kvslim.baselines.per_token import IntegerCache, RotatedCache
from kvslim.baselines.transformers_cache import TransformersCache
from kvslim.baselines.xkv import XkvCache

__all__ = [
    "Float8Cache",
    "IntegerCache",
    "KiviCache",
    "KvquantCache",
    "KvtcCache",
    "RotatedCache",
    "TransformersCache",
    "XkvCache",
]
