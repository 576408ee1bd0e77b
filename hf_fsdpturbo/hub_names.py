"""Whether the name of a model or data set is a path or a Hub id, and what to say of one that is not here."""

from __future__ import annotations

from typing import Any


def is_path(name: str) -> bool:
    """Written as a path, or as no Hub id can be (``a/b/c``, blanks)."""
    if name.startswith(("/", "./", "../", "~")):
        return True
    from huggingface_hub.errors import HFValidationError  # late: a path needs no import of a third of a second
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def cached_file(name: str, file: str, revision: Any = None) -> str | None:
    """Path of a file of the Hub id ``name`` in this machine's cache, None where it is not; the Hub is not asked.

    Args:
        name: Hub id.
        file: path inside its repository.
        revision: branch, tag or commit; what is no text counts as main.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, revision=revision if isinstance(revision, str) else None)
    return found if isinstance(found, str) else None  # also an object: the Hub has said that there is none


def is_cached(name: str, files: tuple[str, ...], revision: Any = None) -> bool:
    """Whether one of ``files`` of the Hub id ``name`` is in this machine's cache."""
    return any(cached_file(name, file, revision or None) for file in files)


def offline() -> bool:
    """Whether the user forbids to ask the Hub (``HF_HUB_OFFLINE=1``)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def not_here(argument: str, name: str, otherwise: str) -> str:
    """What to say of a name that is not here: that a path leads nowhere, else ``otherwise``; ``argument`` first."""
    if is_path(name):
        return f"{argument}: there is no folder {name!r}. Correct the path."
    return f"{argument} {name!r} is no {otherwise}."
