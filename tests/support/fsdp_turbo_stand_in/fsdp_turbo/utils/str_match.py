"""Whole-name pattern match: {*} digits, * anything, ? one character."""

import re


def module_name_match(pattern: str, string: str) -> bool:
    expression = re.escape(pattern).replace(r"\{\*\}", r"\d+").replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, string) is not None
