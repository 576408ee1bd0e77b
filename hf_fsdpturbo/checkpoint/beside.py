"""What lies beside a model's weights and belongs to them: tokenizer, processor, generation config, licence, code."""

from __future__ import annotations

import os
import re
import shutil

TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|.*\.model"
    r"|.*tiktoken|chat_template.*\.(jinja|json)"
)
PROCESSOR = re.compile(r"(video_|audio_)?(pre)?processor_config\.json")
OTHERS = re.compile(r"generation_config\.json|(LICENSE|NOTICE|USE_POLICY)[\w.-]*|.*\.(py|jinja)")
"""What of a base goes with every model made of it; a model card does not."""


def copy_beside(base: str, adapter: str, out: str) -> None:
    """Tokenizer, chat template and processor, the adapter's where it has some; what else of the base a model needs."""
    for kind in (TOKENIZER, PROCESSOR):
        _copy(adapter if matching(adapter, kind) else base, kind, out)
    _copy(base, OTHERS, out, replace=False)


def matching(folder: str, *kinds: re.Pattern[str]) -> list[str]:
    """Names of the files in a folder that are of one of these kinds."""
    names = (name for name in sorted(os.listdir(folder)) if any(kind.fullmatch(name) for kind in kinds))
    return [name for name in names if os.path.isfile(os.path.join(folder, name))]


def _copy(folder: str, kind: re.Pattern[str], out: str, replace: bool = True) -> None:
    for name in matching(folder, kind):
        target = os.path.join(out, name)
        if replace or not os.path.exists(target):
            shutil.copyfile(os.path.join(folder, name), target)
