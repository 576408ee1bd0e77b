"""A ready recipe trains two steps at its layout, its model shrunk; `python -m tests.models_recipes` runs all."""

from __future__ import annotations

from tests.models_recipes.run import two_steps


def test_two_steps_of_a_recipe():
    assert len(two_steps("glm-4.5-air/lora_8x80", timeout=120)) == 2
