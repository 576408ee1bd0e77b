"""Checksums of what a checkpoint holds: they find damage and mix-ups, not malice; 18 GB/s on one core."""

from __future__ import annotations

from typing import Any

import xxhash

HASH = "xxh3_128"
Checksum = xxhash.xxh3_128
"""Takes bytes by ``update``; ``hexdigest`` is the checksum."""


def checksum(data: Any) -> str:
    """Checksum of bytes."""
    return xxhash.xxh3_128_hexdigest(data)
