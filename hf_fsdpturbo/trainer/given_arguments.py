"""The arguments that a trainer was given, by name: also those that its ``__init__`` only passes on as ``**kwargs``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any


class GivenArguments:
    """Arguments of ``parent_init`` before it is called; read, replaced, then handed over with ``args`` and ``kwargs``.

    Args:
        parent_init: bound ``__init__`` of the trainer behind the mixin.
        classes: the classes behind the mixin, in method resolution order.
        args: positional arguments.
        kwargs: keywords.

    Raises:
        ValueError: positional arguments that only ``*args`` takes: nobody can tell which one is the model.
    """

    def __init__(
        self, parent_init: Any, classes: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._bound = inspect.signature(parent_init).bind_partial(*args, **kwargs)
        kinds = {parameter.kind: name for name, parameter in self._bound.signature.parameters.items()}
        self._rest = kinds.get(inspect.Parameter.VAR_KEYWORD)
        self._taken = names_taken(classes)
        unnamed = kinds.get(inspect.Parameter.VAR_POSITIONAL)
        if unnamed is not None and self._bound.arguments.get(unnamed):
            raise ValueError(
                f"{len(self._bound.arguments[unnamed])} positional arguments go into *{unnamed} of "
                f"{parent_init.__qualname__}, where hf_fsdpturbo cannot tell model from args. Pass them by keyword: "
                "model=..., args=..."
            )

    def get(self, name: str) -> Any:
        """The value that was given, else None."""
        arguments = self._bound.arguments
        return arguments[name] if name in arguments else arguments.get(self._rest or "", {}).get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._bound.signature.parameters or self._rest is None:
            self._bound.arguments[name] = value
        else:
            self._bound.arguments.setdefault(self._rest, {})[name] = value

    def takes(self, name: str) -> bool:
        """Whether the trainer has such an argument."""
        return name in self._taken

    @property
    def args(self) -> tuple[Any, ...]:
        return self._bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        return self._bound.kwargs


def names_taken(classes: Iterable[type]) -> set[str]:
    """Argument names of the first ``__init__`` and, as long as one passes ``**kwargs`` on, of those behind it."""
    names: set[str] = set()
    for cls in classes:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters
        names.update(parameters)
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names
