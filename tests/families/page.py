"""``docs/models.md``, written from the record: what holds for which family, and nothing that was not run."""

from __future__ import annotations

from typing import Any

from tests.families.checks import CHECKS, CRASH, NOT_RUN, REFUSED, RIGHT, WRONG
from tests.families.record import Record, totals

COLUMNS = {"load": "loads by path", "train": "trains at ep", "bf16": "bf16", "cp": "cp", "save": "saves"}
WORDS = {RIGHT: "yes", WRONG: "**wrong**", CRASH: "fails", REFUSED: "refused", NOT_RUN: "not run"}
WORST_FIRST = (WRONG, CRASH, NOT_RUN, REFUSED, RIGHT)
NOTE = 110  # characters of a detail

HEAD = """# Model families

Every model type of Transformers {transformers} that has an expert-parallel plan, and the MoE families without one. This page is
written by `python -m tests.families --markdown docs/models.md` (`make families`) from `tests/families/record.json`:
do not edit it. Each family is a tiny model with all its kinds of layers, saved as Transformers saves a release of it,
and run on CPU over gloo (torch {torch}, trl {trl}, accelerate {accelerate}).

| column | what was compared with one plain process |
|---|---|
| loads by path | every tensor, bit for bit, at ep 2, at ep 2 x efsdp 2, and with two replicas of the dense part |
| trains at ep | loss, every gradient, weights after two steps, at ep 2 (by path and as an object) and ep 2 x efsdp 2; within 1e-5, or ten times what half an ulp in the weights does |
| bf16 | loaded and computed in bf16 at ep 2: runs, losses within 1e-3 of plain bf16; no gradient further from float32 than 1.5 times plain's, stored in float32 and in bf16 |
| cp | the same as training, at cp 2; *refused*: by name, with the reason |
| saves | `save_model`: keys, bits and config as plain TRL's |
| released layout | how the release names its tensors: an expert a tensor, converted in another way, or as the model does |

Distance from float32: root mean square over six batches, with the expert choices of the float32 run forced on both. In one
case a gradient may be over 1.5: with float32 storage plain's experts compute in float32 under autocast, ours in bf16; it
must then be within 1.1 of plain whose experts are bf16 too. `python -m tests.families --checks near --distances` prints all.

*fails*: an error that does not name the cause. **wrong**: other numbers and no error.
"""  # noqa: E501

WITHOUT_PLAN = """`llama4` and `longcat_flash` have a spec of ours. Others whose experts are stacked can be registered;
[register.md](register.md) has the code for dbrx, doge and jetmoe. Where experts are a module each (nllb_moe,
switch_transformers), expert parallelism has nothing to cut: `ep_size=1`.
"""


def page(record: Record) -> str:
    """The whole page."""
    head = HEAD.format(**record["versions"])
    rows = ["| family | class | " + " | ".join(COLUMNS.values()) + " | released layout | note |"]
    rows.append("|---" * (len(COLUMNS) + 4) + "|")
    families = record["families"]
    rows += [_row(name, entry) for name, entry in families.items() if entry["plan"] and _built(entry)]
    plain = [_row(name, entry) for name, entry in families.items() if not entry["plan"] and _built(entry)]
    rest = [f"- `{name}`: {_reason(entry)}" for name, entry in families.items() if not _built(entry)]
    count = ", ".join(f"{WORDS[kind].strip('*')} {number}" for kind, number in totals(record).items())
    parts = [head, f"Checks: {count}.\n", *rows]
    if plain:
        parts += ["\n## Without an expert plan in Transformers\n", WITHOUT_PLAN, *rows[:2], *plain]
    if rest:
        parts += ["\n## Not swept by themselves\n", *rest]
    return "\n".join(parts) + "\n"


def _reason(entry: dict[str, Any]) -> str | None:
    return entry.get("not_swept") or entry.get("not_built")


def _built(entry: dict[str, Any]) -> bool:
    return _reason(entry) is None


def _row(name: str, entry: dict[str, Any]) -> str:
    cells, notes = [], [entry["plain"]] if "plain" in entry else []
    for column in COLUMNS:
        asked = [entry["checks"][check] for check in CHECKS if CHECKS[check].column == column]
        ran = [verdict for verdict in asked if verdict["kind"] != NOT_RUN]
        worst = _worst(ran or asked)
        cells.append(WORDS[worst["kind"]] + (" (partly run)" if ran and len(ran) < len(asked) else ""))
        if worst["kind"] not in (RIGHT, NOT_RUN):
            notes.append(f"{column}: {_short(worst['detail'])}")
    note = "; ".join(dict.fromkeys(notes)).replace("|", "/")
    return f"| `{name}` | {entry['architecture']} | " + " | ".join(cells) + f" | {entry['layout']} | {note} |"


def _worst(verdicts: list[dict[str, str]]) -> dict[str, str]:
    return min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict["kind"]))


def _short(detail: str) -> str:
    """The detail on one line; underscores and stars of names stay literal in code spans of nothing else."""
    text = " ".join(detail.split())
    text = text if len(text) <= NOTE else text[: NOTE - 3].rsplit(" ", 1)[0] + " ..."
    return text.replace("*", r"\*").replace("<", "&lt;")
