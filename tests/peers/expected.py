"""Tests of peers that pass with their own class and must not pass with ours, each with the reason we defend.

Keys are the end of a test's id, without its parameters.
"""

from __future__ import annotations

EXPECTED: dict[str, str] = {}
