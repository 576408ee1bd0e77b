"""Alpaca's and ShareGPT's rows become TRL's, as written on paper; what cannot be converted is named."""

import pytest
from datasets import Dataset, DatasetDict

from hf_fsdpturbo.trainer.data_formats import converted

USER, ANSWER = {"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Be short."}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
HUMAN, GPT = {"from": "human", "value": "Add.\n1 2"}, {"from": "gpt", "value": "3"}
BAD = {"from": "gpt", "value": "4"}


@pytest.mark.parametrize(("row", "expected"), [
    (ALPACA, {"prompt": [USER], "completion": [ANSWER]}),
    ({**ALPACA, "instruction": "Add.\n1 2", "input": ""}, {"prompt": [USER], "completion": [ANSWER]}),
    (
        {**ALPACA, "system": "Be short.", "history": [["Add.\n1 2", "3"]]},
        {"prompt": [SYSTEM, USER, ANSWER, USER], "completion": [ANSWER]},
    ),
    (
        {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "4"}]},
    ),
    ({"conversations": [HUMAN, GPT], "system": "Be short."}, {"messages": [SYSTEM, USER, ANSWER]}),
    ({"messages": [HUMAN, GPT]}, {"messages": [USER, ANSWER]}),
    (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": BAD},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "4"}]},
    ),
])  # fmt: skip
def test_rows_on_paper(row, expected):
    data = Dataset.from_list([row, row])
    for found in (converted(data), converted(data.to_iterable_dataset())):
        assert list(found) == [expected, expected]
    assert list(converted(DatasetDict(train=data))["train"]) == [expected, expected]


@pytest.mark.parametrize("row", [
    {"text": "as it is"},
    {"messages": [USER, ANSWER]},
    {"prompt": "1 + 2", "completion": "3"},
    {"prompt": "1 + 2", "chosen": "3", "rejected": "4"},
    {"conversations": [USER, ANSWER]},
    {**ALPACA, "text": "Add 1 2 is 3"},
])  # fmt: skip
def test_what_trl_understands_stays(row):
    data = Dataset.from_list([row])
    assert converted(data) is data


@pytest.mark.parametrize(("row", "words"), [
    ({**ALPACA, "output": None}, ["row 1", "output", "None", "text"]),
    ({"conversations": [{"from": "alien", "value": "Hi"}]}, ["row 1", "conversations", "'alien'", "'human'"]),
    ({"conversations": []}, ["row 1", "conversations", "empty"]),
    ({"conversations": [HUMAN, GPT], "tools": "[]"}, ["row 1", "tools"]),
])  # fmt: skip
def test_a_bad_row_is_named(row, words):
    good = ALPACA if "output" in row else {"conversations": [HUMAN, GPT]}
    with pytest.raises(ValueError, match="row") as caught:
        converted(Dataset.from_list([{**dict.fromkeys(row), **good}, row]))
    for word in words:
        assert word in str(caught.value)
