"""Distance of two records: what ``hf-fsdpturbo verify`` compares with."""

from __future__ import annotations

from hf_fsdpturbo.verify.compared import TOLERANCE, Comparison, Row, compare, distance

__all__ = ["TOLERANCE", "Comparison", "Row", "compare", "distance"]
