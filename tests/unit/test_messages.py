"""Issue 14, item 9: what a mistake says. Each test has the number of its row."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from hf_fsdpturbo import FSDPTurboDPOTrainer, FSDPTurboSFTTrainer, FSDPTurboTrainingArguments, compat, launch_config
from hf_fsdpturbo.arguments import describe_sources, turbo_arguments
from hf_fsdpturbo.commands import recipe
from hf_fsdpturbo.trainer.data_columns import check_data, refuse_columns
from hf_fsdpturbo.trainer.refusals import refuse_missing_packages

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("FSDPTURBO_", "ACCELERATE_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(turbo_arguments, "_warned", set())


def says(call: Any, *words: str, without: tuple[str, ...] = ()) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        call()
    text = str(caught.value)
    assert not [word for word in words if word not in text], text
    assert not [word for word in without if word in text], text


def build(folder: Path, **fields: Any) -> FSDPTurboTrainingArguments:
    return FSDPTurboTrainingArguments(**{"output_dir": str(folder), "use_cpu": True, "report_to": "none", **fields})


def accelerate_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(f"compute_environment: LOCAL_MACHINE\nnum_processes: 2\n{text}")
    monkeypatch.setenv(launch_config.CONFIG_VARIABLE, str(path))


def test_m1_our_key_without_its_prefix_in_the_accelerate_yaml(tmp_path, monkeypatch):
    accelerate_yaml(tmp_path, monkeypatch, "distributed_type: MULTI_GPU\nfsdp_config:\n  ep_size: 2\n")
    says(lambda: build(tmp_path), "ep_size=2", "Write fsdp_turbo_ep_size", without=("Remove",))
    accelerate_yaml(tmp_path, monkeypatch, "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n")
    says(lambda: build(tmp_path), "fsdp_version", "Remove")


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_m2_the_accelerate_spelling_in_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("fsdp_turbo_ep_size: 2\n")
    common = ["--output_dir", str(tmp_path), "--use_cpu", "true"]
    parser = script("sft").make_parser
    wrong = "fail_with_unknown_args"
    says(
        lambda: recipe.parse(parser(), [*common, "--config", str(path)]),
        "write ep_size here",
        "--config",
        without=(wrong,),
    )
    says(lambda: recipe.parse(parser(), [*common, "--fsdp_turbo_cp_size", "2"]), "write cp_size here", "command line")
    says(lambda: recipe.parse(parser(), [*common, "--ep_sise", "2"]), "['ep_sise']", "--help", without=(wrong,))
    assert recipe.parse(parser(), [*common, "--ep_size", "1"])[1].ep_size == 1


def test_m3_no_torch_npu(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_config, "world_size", lambda: 2)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    accelerate_yaml(tmp_path, monkeypatch, "distributed_type: MULTI_NPU\n")
    says(
        lambda: build(tmp_path, use_cpu=False), "torch-npu, which is not installed", "MULTI_NPU", without=("use_cpu",)
    )


def test_m5_names_what_was_typed():
    alone = SimpleNamespace(load_in_4bit=True, load_in_8bit=False, use_peft=False)
    says(lambda: recipe.refuse_typed(alone), "--load_in_4bit", "--use_peft", without=("quantization_config",))
    wide = SimpleNamespace(load_in_4bit=False, load_in_8bit=True, use_peft=True)
    says(lambda: recipe.refuse_typed(wide), "--load_in_8bit", "--load_in_4bit", without=("quantization_config",))
    recipe.refuse_typed(SimpleNamespace(load_in_4bit=False, load_in_8bit=False))
    recipe.refuse_typed(SimpleNamespace(load_in_4bit=True, load_in_8bit=False, use_peft=True))


def test_m6_export_names_its_own_argument(tmp_path, capsys):
    from hf_fsdpturbo.commands import export_door

    with pytest.raises(SystemExit, match="2"):
        export_door.main([str(tmp_path / "nothere"), str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "CHECKPOINT" in said
    assert "is no directory" in said
    assert "resume_from_checkpoint" not in said


def look(trainer: type, rows: dict[str, list[Any]], **given: Any) -> None:
    config = SimpleNamespace(dataset_text_field="text", dataset_kwargs=None)
    refuse_columns(trainer, {"train_dataset": Dataset.from_dict(rows), **given}, config)  # type: ignore[arg-type]


SHAREGPT = {"conversations": [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]]}


def test_m7_columns_are_named():
    sft, dpo = FSDPTurboSFTTrainer, FSDPTurboDPOTrainer
    alpaca = {"instruction": ["a"], "input": [""], "outptu": ["b"]}
    says(lambda: look(sft, alpaca), "'outptu'", "dataset_text_field", "dataset_formats", "'completion'")
    says(lambda: look(dpo, {"prompt": ["a"], "good": ["b"]}), "'good'", "chosen", "rejected", "rename_column")
    for rows in (
        {"text": ["a"]},
        {"messages": [[{"role": "user", "content": "a"}]]},
        {"input_ids": [[1]], "x": [1]},
        {"conversations": [[{"from": "user", "value": "a"}]]},
        {"prompt": ["a"], "completion": ["b"]},
    ):
        look(sft, rows)
    look(sft, alpaca, formatting_func=str)
    given: Any = {"train_dataset": Dataset.from_dict({"text": ["a"]})}
    refuse_columns(sft, given, SimpleNamespace())  # plain TrainingArguments
    look(dpo, {"chosen": ["a"], "rejected": ["b"], "x": [1]})
    says(lambda: look(sft, {"text": ["a"]}, eval_dataset={"test": Dataset.from_dict(alpaca)}), "eval_dataset 'test'")


def settled(trainer: type, rows: dict[str, list[Any]], **more: Any) -> dict[str, Any]:
    """The trainer's arguments after its data sets were looked at; a word for what was converted."""
    given = {"train_dataset": Dataset.from_dict(rows), **more}
    check_data(trainer, given, SimpleNamespace(dataset_text_field="text", dataset_kwargs=None))  # type: ignore[arg-type]
    return given


def test_foreign_rows_become_trls_in_the_trainer(caplog):
    """Where TRL would fail or drop every row; what it trains on as it is stays the same object."""
    sft, dpo = FSDPTurboSFTTrainer, FSDPTurboDPOTrainer
    alpaca = {"instruction": ["Add."], "input": ["1 2"], "output": ["3"]}
    stream = Dataset.from_dict(SHAREGPT).to_iterable_dataset()
    given = settled(sft, alpaca, eval_dataset={"a": stream, "b": Dataset.from_dict({"text": ["c"]})})
    user, answer = {"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}
    assert list(given["train_dataset"]) == [{"prompt": [user], "completion": [answer]}]
    assert [m["role"] for m in next(iter(given["eval_dataset"]["a"]))["messages"]] == ["user", "assistant"]
    assert list(given["eval_dataset"]["b"]) == [{"text": "c"}]
    assert [record.getMessage()[:20] for record in caplog.records] == ["train_dataset: rows ", "eval_dataset 'a': ro"]
    pairs = settled(dpo, {"instruction": ["Add."], "chosen": ["3"], "rejected": ["4"]})["train_dataset"]
    assert sorted(pairs.column_names) == ["chosen", "prompt", "rejected"]
    for rows, more in (
        ({**alpaca, "text": ["as it is"]}, {}),
        (alpaca, {"formatting_func": str}),
        ({**alpaca, "input_ids": [[1]]}, {}),
        ({"conversations": [[{"from": "user", "value": "a"}]]}, {}),
    ):
        assert settled(sft, rows, **more)["train_dataset"].column_names == list(rows)
    says(lambda: settled(sft, {**alpaca, "output": [None]}), "train_dataset", "row 0", "output holds None")
    says(lambda: settled(sft, {"instruction": [], "output": []}), "train_dataset has no rows")


def test_c11_formats_mixed():
    rows = {"text": ["a", None], "messages": [None, [{"role": "user", "content": "a"}]]}
    says(lambda: look(FSDPTurboSFTTrainer, rows), "['text', 'messages']", "mixed", "one format at a time")
    look(FSDPTurboSFTTrainer, {**rows, "text": ["a", "b"]})


def test_m9_the_summary_says_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPTURBO_EP_SIZE", "2")
    assert "environment: dist_config.ep_size=2, reduced to 1" in describe_sources(build(tmp_path))


def test_m11_a_missing_reporter_is_named_before_the_model_is_loaded(tmp_path, monkeypatch):
    import transformers.integrations as integrations

    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: [])
    config = build(tmp_path, report_to=["tensorboard"])
    says(lambda: refuse_missing_packages(config), "report_to='tensorboard'", "not installed")
    refuse_missing_packages(build(tmp_path, report_to="all"))


def test_c10c_bare_errors(tmp_path, monkeypatch):
    says(lambda: build(tmp_path, max_grad_norm=None), "max_grad_norm is None", "Use 0")
    monkeypatch.setattr(compat, "is_available", lambda module: False)
    config = build(tmp_path, use_liger_kernel=True)
    says(lambda: refuse_missing_packages(config), "use_liger_kernel=True needs liger-kernel")


FAILING = """
import sys
from hf_fsdpturbo.commands.one_error import run_recipe

def main():
    raise ValueError(f"the one cause\\nsecond line")

run_recipe(main)
"""


def test_m8_one_error_a_failure(tmp_path):
    """Three ranks of one node, one after another, as elastic starts them."""
    script_file = tmp_path / "failing.py"
    script_file.write_text(FAILING)
    said, files = [], []
    for rank in range(3):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        files.append(folder / "error.json")
        environment = {
            **os.environ,
            "TORCHELASTIC_ERROR_FILE": str(files[-1]),
            "RANK": str(rank),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, script_file], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 1
        said.append(done.stderr)
    assert [text.count("Traceback") for text in said] == [0, 0, 0]
    assert all(text.strip().splitlines()[-1] == f"[rank {r}] ValueError: the one cause" for r, text in enumerate(said))
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = [ProcessFailure(rank, 1, 1, str(file)) for rank, file in enumerate(files)]
    assert min(failures, key=lambda failure: failure.timestamp).local_rank == 0
    assert "Traceback" in failures[0].message["extraInfo"]["py_callstack"]
    assert failures[1].message == "as the first rank: ValueError: the one cause"
    alone = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    done = subprocess.run(
        [sys.executable, script_file],
        env={**alone, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.count("Traceback") == 1
