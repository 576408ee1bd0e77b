"""The numbers of per-expert tensors are exactly 0 to E-1, once each: they alone say which expert a tensor is.

Transformers stacks the tensors in the order of their numbers, whatever these are: with one of them changed
(``experts.1`` to ``experts.9`` is one bit) all experts after it move up by one, and no shape tells. They come in the
order of the whole keys, whose dots its patterns read as any character: ``mlp/experts.1`` is stacked too, elsewhere.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from hf_fsdpturbo.bounded import cut


@functools.cache
def _plain_numbers(count: int) -> set[str]:
    return {str(number) for number in range(count)}


def check_expert_numbers(name: str, pattern: str, sources: Sequence[tuple[str, str]]) -> None:
    """Check the tensors of one kind that are stacked into one parameter.

    Args:
        name: of the parameter.
        pattern: the converter's, with ``*`` where the number is.
        sources: (file, key) of each.

    Raises:
        ValueError: a number that is none of 0 to E-1, is there twice, or is not written plainly; keys that differ in
            more than the number; names file and key.
    """
    tail = pattern.rpartition("*")[2].rstrip("$").replace("\\.", ".")
    heads, _, numbers = zip(*(key.removesuffix(tail).rpartition(".") for _, key in sources), strict=True)
    (usual, count), *others = Counter(heads).most_common()
    if others:
        file, key = next(source for source, head in zip(sources, heads, strict=True) if head != usual)
        raise ValueError(
            f"{file}: {cut(key)[1:-1]}: {count} of the {len(sources)} tensors from which {name} is made begin with "
            f"{cut(usual)[1:-1]}, and all must. Copy the checkpoint again."
        )
    if set(numbers) == _plain_numbers(len(sources)):
        return
    seen: dict[int, str] = {}
    for (file, key), text in zip(sources, numbers, strict=True):
        plain = text.isascii() and text.isdecimal() and len(text) < 10 and text == str(int(text))
        number = int(text) if plain else -1
        if not plain or number >= len(sources) or number in seen:
            why = f"as {cut(seen[number])[1:-1]} has it too" if number in seen else f"not {cut(text)}"
            raise ValueError(
                f"{file}: {cut(key)[1:-1]}: the {len(sources)} tensors from which {name} is made must be numbered 0 "
                f"to {len(sources) - 1}, once each, {why}. Copy the checkpoint again."
            )
        seen[number] = key
