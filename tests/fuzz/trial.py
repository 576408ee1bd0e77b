"""One case on the ranks of a spawn: what it came to is written down at once, so that a hang loses one case."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.cases import Case

SECONDS = 30
"""For one case; then the process ends, and the case counts as a hang."""


def try_cases(cases: list[Case], good: dict[str, str], record: str) -> int:
    """Rank function: one line a case into ``<record>.<rank>``."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(good["single"])
    with open(f"{record}.{os.environ.get('RANK', '0')}", "a", encoding="utf-8") as file:
        for case in cases:
            signal.alarm(SECONDS)
            outcome = _outcome(case, good, tokenizer)
            file.write(json.dumps({"number": case.number, **outcome}) + "\n")
            file.flush()
    signal.alarm(0)
    return len(cases)


def _outcome(case: Case, good: dict[str, str], tokenizer: Any) -> dict[str, Any]:
    from hf_fsdpturbo import parallel_state
    from tests.support.reference_run import forget_accelerate

    forget_accelerate()
    parallel_state._STATE = None
    try:
        return {"error": "", "digest": _run(case, good, tokenizer)}
    except BaseException as error:  # noqa: BLE001  (the judge says what it may be)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        text = str(error).encode("utf-8", "backslashreplace").decode()
        return {"error": type(error).__name__, "refused": "ValueError" in kinds, "text": text}


def _run(case: Case, good: dict[str, str], tokenizer: Any) -> float:
    """What a user would do. Returns a digest of this rank's weights."""
    from datasets import Dataset

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer
    from tests.support.records import DEFAULT_ARGS

    if case.kind == "text":
        return _read_text(*case.text)
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    fields: dict[str, Any] = {**DEFAULT_ARGS, "max_length": 16, "max_steps": 3, "output_dir": tempfile.mkdtemp()}
    if many:
        fields = {**fields, "ep_size": 2, "dist_timeout": 20}
    if "dist_config" in case.args or "ep_size" in case.args:
        fields.pop("ep_size", None)
    args = FSDPTurboSFTConfig(**{**fields, **case.args})
    if case.kind == "settings":
        return 0.0
    rows = {"text": ["some text that is long enough"] * 6} if case.rows is None else case.rows
    trainer = FSDPTurboSFTTrainer(
        case.model or good["single"], args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer
    )
    if case.kind in ("rows", "checkpoint"):
        trainer.train(resume_from_checkpoint=case.checkpoint or None)
    return _digest(trainer.model)


def _read_text(reader: str, text: str) -> float:
    from hf_fsdpturbo.arguments import check_command_line
    from hf_fsdpturbo.arguments.mappings import parse_mapping
    from hf_fsdpturbo.bounded import parse_json, parse_yaml
    from hf_fsdpturbo.launch_config.accelerate_yaml import read_yaml

    of_file: dict[str, Any] = {
        "dist_config": lambda path: parse_mapping("dist_config", path),
        "recipe": lambda path: check_command_line(["--config", path]),
        "accelerate": lambda path: read_yaml(Path(path), "a test", None),
    }
    if reader in of_file:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8", prefix="the text ") as file:
            file.write(text.encode("utf-8", "replace").decode())
            file.flush()
            of_file[reader](file.name)
    else:
        (parse_yaml if reader == "yaml" else parse_json)(text, "the text")
    return 0.0


def _digest(model: Any) -> float:
    from hf_fsdpturbo.shards import local_tensor

    total = 0.0
    for parameter in model.parameters():
        values = local_tensor(parameter).detach().double().reshape(-1)
        total += float((values * values.cos()).sum()) + float(values[: values.numel() // 2].sum())
    return total
