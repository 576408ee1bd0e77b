"""The command line: wrong words get one line and status 2, early; right ones become `accelerate launch`."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdpturbo import __version__, cli, shipped
from hf_fsdpturbo.commands import known_names, launched, recipe_words
from hf_fsdpturbo.commands.launch_options import make_parser
from hf_fsdpturbo.launch_config.slurm import first_host, slurm_step

ROOT = Path(__file__).parents[2]
CPU = ["--accelerate_config", "cpu_ep2"]
MODEL, DATA = ["--model_name_or_path", "some/model"], ["--dataset_name", "some/data"]
NAMED = [*MODEL, *DATA]
HEAD = ["--rdzv_endpoint", "head:1234"]


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch):
    monkeypatch.setattr(recipe_words, "offline", lambda: False)  # some/model may be on the Hub
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unparsed(monkeypatch):
    """TRL's parser left out, and accelerate's reading: what comes before them is looked at."""
    monkeypatch.setattr(launched, "check_by_parser", lambda *arguments: None)


def launch(*words: str, name: str = "sft") -> list[str]:
    """Words for accelerate and the recipe, from ours."""
    options, rest = make_parser("p", "d").parse_known_args(list(words))
    return launched.launch_command(name, options, rest)[3:]


def refused(capsys, words: list[str]) -> str:
    """The one line that is said, after exit status 2."""
    with pytest.raises(SystemExit) as status:
        cli.main(words)
    assert status.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert __version__ in said
    assert all(f"\n  {name} " in said for name in cli.COMMANDS)


WRONG = {
    "COMMAND": ["train"],
    "--nproc": ["sft", "--nproc", "none"],
    "--nnodes": ["dpo", "--nnodes", "0"],
    "--node_rank": ["reward", "--node_rank", "-1"],
    "--rdzv_endpoint": ["sft", "--rdzv_endpoint", "head:port"],
    "--accelerate_config": ["sft", "--accelerate_config", "cpu_ep3"],
    "--config": ["sft", *CPU, "--config", "nowhere.yaml"],
    "--config: a value is missing": ["sft", *CPU, "--config"],
    "--model_name_or_path": ["sft", *CPU, *DATA],
    "--model_name_or_path: there is no folder": ["sft", *CPU, "--model_name_or_path=./nowhere", *DATA],
    "--dataset_name": ["sft", *CPU, *MODEL],
    "--model_name_or_path: there is no folder 'a/b/c'": ["dpo", *CPU, "--model_name_or_path", "a/b/c", *DATA],
    f"--model_name_or_path: the folder {str(ROOT)!r} has no config.json": [
        "sft",
        *CPU,
        "--model_name_or_path",
        str(ROOT),
        *DATA,
    ],
    "--dataset_name: there is no file or folder 'a/b/c'": ["sft", *CPU, *MODEL, "--dataset_name", "a/b/c"],
    "but it is 'warp'": ["sft", *CPU, *NAMED, "--ep_dispatcher", "warp"],
    "hang_timeout must be a positive integer": ["dpo", *CPU, *NAMED, "--hang_timeout=-1"],
    "--cp_size must be a whole number": ["reward", *CPU, *NAMED, "--cp-size", "010"],
    "--freeze_routers must be true or false": ["sft", *CPU, *NAMED, "--freeze_routers", "maybe"],
    "router_lr_scale must be more than 0": ["sft", *CPU, *NAMED, "--router_lr_scale", "-1"],
    "kernel_config name 'x' is unknown": ["sft", *CPU, *NAMED, "--kernel_config", '{"name": "x"}'],
    "ep_size (3) must divide dp_size (2)": ["sft", *CPU, *NAMED, "--ep_size", "3"],
    "ep_size (2) must divide dp_size (3)": ["sft", *CPU, *NAMED, "--nproc", "3"],
    "hook_modules": ["sft", *CPU, *NAMED, "--dist_config", '{"hook_modules": ["a"]}'],
    "max_length must be a number of 1 or more, but it is -4": ["sft", *CPU, *NAMED, "--max_length", "-4"],
    "learning_rate must be a number of 0 or more, but it is nan": ["sft", *CPU, *NAMED, "--learning_rate", "nan"],
    "argument --devices": ["plan", "some/model", "--devices", "x"],
    "unrecognized arguments: --wrong": ["plan", "some/model", "--devices", "8", "--wrong"],
    "MODEL: there is no folder './nowhere'": ["plan", "./nowhere", "--devices", "8"],
    "MODEL: there is no folder 'a/b/c'": ["verify", "a/b/c"],
    "MODEL 'some/model' is no shipped name": ["verify", "some/model"],
    "verify: error: dist_config ep_dispatcher must be one of": ["verify", "qwen3-30b-a3b", "--ep_dispatcher", "warp"],
    "argument RUN: there is no folder 'nowhere'": ["report", "nowhere"],
    "argument FILE: there is no file 'nowhere.yaml'": ["convert", "nowhere.yaml"],
    "--dataset_name: there is no file": ["sft", *CPU, *MODEL, "--dataset-name", "nowhere.jsonl"],
    "--node_rank must be below the number of machines (2)": ["sft", *CPU, "--nnodes=2", "--node_rank=2", *HEAD],
    "--node_rank is needed": ["sft", *CPU, "--nnodes", "2", *HEAD],
    "--rdzv_endpoint is needed": ["sft", *CPU, "--nnodes", "2", "--node_rank", "0"],
    "--nproc is needed": ["sft", "--nnodes", "2", "--node_rank", "0", *HEAD],
    "--rdzv_endpoint is for several machines": ["sft", *CPU, *HEAD],
    "argument NAME": ["configs", "cpu_ep3"],
    "argument --out": ["configs", "cpu_ep2", "--out", str(ROOT / "setup.cfg")],
    "--timeout": ["doctor", "--timeout", "soon"],
    "CHECKPOINT nowhere is no directory": ["export", "nowhere", "out"],
    "--base is for --merge": ["export", str(ROOT), "new", "--base", "x"],
    "--merge: ": ["export", str(ROOT), "new", "--merge"],
    "OUT ": ["export", str(ROOT), str(ROOT)],
    "ADAPTER: there is no folder './nowhere'": ["merge", "./nowhere", "--out", "new"],
    "ADAPTER 'nowhere' is no folder, nor": ["merge", "nowhere", "--out", "new"],
    "--out": ["merge", "nowhere"],
    "--max-file-size": ["export", "a", "b", "--max-file-size", "big"],
}


@pytest.mark.parametrize("part", WRONG)
def test_wrong_words_get_one_line_and_2(part, capsys):
    said = refused(capsys, WRONG[part])
    assert part in said
    assert said.startswith(f"hf-fsdpturbo{'' if part == 'COMMAND' else ' ' + WRONG[part][0]}: error: ")


FILES = {
    "- a list": "must be a YAML mapping",
    "num_processes: [": "cannot be read",
    "num_processes: two": "num_processes must be a whole number",
    "num_processes: 3\nnum_machines: 2": "num_machines=2 must divide num_processes=3",
    "distributed_type: FSDP": "distributed_type=FSDP",
    "deepspeed_config: {zero_stage: 2}": "deepspeed_config",
    "fsdp_config: 2": "fsdp_config must be a mapping",
    "fsdp_config: {fsdp_version: 2}": "fsdp_version",
    "fsdp_config: {fsdp_turbo_ep_siez: 2}": "fsdp_turbo_ep_siez",
    "fsdp_config: {fsdp_turbo_ep_size: two}": "ep_size",
    "main_process_port: 70000": "main_process_port",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_launch_file_is_named_before_any_import(text, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(text + "\n")
    said = refused(capsys, ["sft", "--accelerate_config", str(tmp_path / "a.yaml"), *NAMED])
    assert "--accelerate_config: " in said
    assert FILES[text] in said
    assert "a.yaml" in said


def test_names_paths_and_yaml_are_checked_without_heavy_imports(tmp_path):
    """The whole way to TRL's parser, in a fresh interpreter."""
    (tmp_path / "a.yaml").write_text("fsdp_config: {fsdp_turbo_ep_siez: 2}\n")
    (tmp_path / "r.yaml").write_text("- no mapping\n")
    (tmp_path / "v.yaml").write_text("check_loading: much\n")
    words = [*CPU, *NAMED]
    code = f"""
import os, sys
from hf_fsdpturbo import cli
for words in (["sft", *{words}, "--config", "r.yaml"], ["dpo", "--accelerate_config", "a.yaml"], ["configs", "x"],
              ["reward", *{CPU}], ["export", "x", "y"], ["merge", "x", "--out", "y"],
              ["sft", *{words}, "--learning_rte", "3"], ["doctor", "--timeout", "0"],
              ["sft", *{words}, "--ep_dispatcher", "warp"], ["sft", *{words}, "--config", "v.yaml"],
              ["dpo", *{words}, "--max_length", "0"], ["plan", "x/y/z", "--devices", "2"], ["sft", *{words}]):
    os.environ.update({{"FSDPTURBO_RECOMPUTE": "some"}} if words == ["sft", *{words}] else {{}})
    try:
        cli.main(words)
    except SystemExit as status:
        assert status.code == 2, words
print(sorted({{"torch", "transformers", "accelerate", "trl"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stdout + done.stderr
    assert done.stderr.count("\n") == 13
    assert all(words in done.stderr for words in ("check_loading must be one of", "is 'warp'", "from environment"))


RECIPE = "qwen3-30b-a3b/sft_8x80"


def test_a_shipped_recipe_by_name(unparsed, capsys):
    """Its path, and eight processes a machine, reach accelerate; wrong kinds and machines are named."""
    path = str(shipped.model_recipes()[RECIPE])
    for words in (["--config", RECIPE], [f"--config={RECIPE}"]):
        found = launch(*words, *DATA)
        assert path in found[-3:] or f"--config={path}" in found
        assert found[found.index("--num_processes") + 1] == "8"
    two = launch("--config", "qwen3-30b-a3b/sft_16x80", *DATA, "--nnodes", "2", "--node_rank", "1", *HEAD)
    assert two[two.index("--num_processes") + 1] == "16"
    given = launch("--config", RECIPE, *CPU, "--nproc", "8", *DATA)
    assert given[1].endswith("cpu_ep2.yaml")  # the launch file says on what
    assert "ep_size (8) must divide dp_size (2)" in refused(capsys, ["sft", "--config", RECIPE, *CPU, *DATA])
    assert "is a recipe of sft" in refused(capsys, ["dpo", "--config", RECIPE, *DATA])
    too_few = ["sft", "--config", "qwen3-30b-a3b/sft_16x80", *DATA]
    assert "--nnodes: the recipe is for 16 devices" in refused(capsys, too_few)
    assert "shipped recipe 'qwen3/sft'" in refused(capsys, ["sft", "--config", "qwen3/sft", *DATA])
    assert cli.main(["configs", RECIPE]) == 0
    assert "planned" in capsys.readouterr().out
    assert cli.main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert "qwen3-30b-a3b/  dpo_16x141" in listed
    assert "sft_vlm" in listed
    assert recipe_words.with_shipped_recipe("sft", ["--config", "sft_vlm"]) == (
        ["--config", str(shipped.recipes()["sft_vlm"])],
        None,
    )


def in_words(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def test_shipped_recipes_parse_strictly():
    """Every one by the parser that the ranks use; its ``dist_config`` too; a key nobody knows is an error."""
    from hf_fsdpturbo.arguments.params import FSDPTurboParams

    recipes = shipped.recipes()
    assert len(recipes) == 81 + 1  # and sft_vlm
    parsers = {name: recipe_words.recipe_parser(name) for name in ("sft", "dpo")}
    for name, path in recipes.items():
        recipe = recipe_words.read_recipe(["--config", str(path)])
        FSDPTurboParams(**recipe.get("dist_config", {}))
        words = [word for key, value in recipe.items() for word in (f"--{key}", *in_words(value))]
        parser = parsers["dpo" if path.stem.startswith("dpo") else "sft"]
        parser.error = recipe_words._raise
        assert argparse.ArgumentParser.parse_known_args(parser, words)[1] == [], name
    with pytest.raises(ValueError, match="ep_sise"):
        recipe_words.check_by_parser("sft", [], {**recipe, "ep_sise": 2})


@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_names_read_from_sources_are_those_of_the_parser(name):
    """Neither more nor fewer; a release that moves a class is seen here, and then refuses nothing early."""
    options = {word for action in recipe_words.recipe_parser(name)._actions for word in action.option_strings}
    taken = {option[2:].replace("-", "_").removeprefix("no_") for option in options if option.startswith("--")}
    assert known_names.field_names(name) == taken | {"config"}  # TRL's parser takes that one out itself


def test_sources_that_are_not_understood_refuse_nothing(monkeypatch):
    assert known_names.unknown_names("sft", ["ep_siez", "no-bf16", "ep-size"]) == ["ep_siez"]
    for broken in ({"trl": ("elsewhere.py",)}, {"no_such_package": ("a.py",)}, {"trl": ("trainer/sft_config.py",)}):
        monkeypatch.setattr(known_names, "_SOURCES", broken)
        assert known_names.unknown_names("sft", ["ep_siez"]) == []


ACCELERATE = {
    (*CPU,): ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"],
    (*CPU, "--nproc", "4"): ["--multi_gpu", "--num_processes", "4", "--num_machines", "1", "--main_process_port", "0"],
    (*CPU, "--nproc", "1"): ["--num_processes", "1", "--num_machines", "1"],
    ("--nproc", "1"): ["--num_processes", "1", "--num_machines", "1"],
    (): ["--num_machines", "1"],
    (*CPU, "--nnodes", "2", "--node_rank", "1", *HEAD): [
        "--multi_gpu", "--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip",
        "head", "--main_process_port", "1234",
    ],
}  # fmt: skip


@pytest.mark.parametrize("words", ACCELERATE)
def test_words_become_those_of_accelerate(words, unparsed):
    got = launch(*words, *NAMED, "--seed", "2")
    file = ["--config_file", str(shipped.launch_files()["cpu_ep2"])] if words[:1] == ("--accelerate_config",) else []
    recipe = ["--module", "hf_fsdpturbo.commands.sft", *NAMED, "--seed", "2"]
    assert got == ["accelerate.commands.launch", *file, *ACCELERATE[words], *recipe][1:]


def test_accelerate_reads_them_so(unparsed):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = launch(*CPU, "--nnodes", "2", "--node_rank", "1", *HEAD, *NAMED)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (args.num_processes, args.num_machines, args.machine_rank, args.main_process_ip) == (4, 2, 1, "head")
    assert (args.multi_gpu, args.use_cpu, args.module) == (True, True, True)
    assert (args.training_script, args.training_script_args) == ("hf_fsdpturbo.commands.sft", NAMED)


def test_a_file_for_several_machines_is_kept(tmp_path, unparsed):
    path = tmp_path / "two.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: head\n"
        "main_process_port: 99\ncompute_environment: LOCAL_MACHINE\nuse_cpu: false\nmain_training_function: main\n"
    )
    words = launch("--accelerate_config", str(path), *NAMED)
    assert words[2:12] == [
        "--multi_gpu", "--num_processes", "16", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip",
        "head", "--main_process_port",
    ]  # fmt: skip
    assert words[12] == "99"
    assert "8" == launch("--accelerate_config", str(path), "--nnodes", "1", *NAMED)[4], "8 of 16 are this machine's"


SLURM = {
    "SLURM_JOB_ID": "20007",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
}


def test_srun_says_which_machine_this_is(monkeypatch, unparsed):
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    words = launch(*CPU, *NAMED)
    assert words[3:13] == [
        "--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "gpu07",
        "--main_process_port", "10007",
    ]  # fmt: skip
    assert "--main_process_ip" not in launch(*CPU, "--nnodes", "1", *NAMED), "what is typed goes before Slurm"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS=16.*--ntasks-per-node=1"):
        slurm_step()
    monkeypatch.delenv("SLURM_STEP_NUM_NODES")
    assert slurm_step() is None
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(ValueError, match="SLURM_JOB_NUM_NODES=2.*srun"):
        slurm_step()


@pytest.mark.parametrize(
    ("names", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],login", "gpu07"), ("r[1,3]n[4-5]", "r1n4"), ("n[03]x", "n03x")],
)
def test_first_host(names, first):
    assert first_host(names) == first


@pytest.mark.parametrize("name", recipe_words.RECIPES)
def test_our_launch_options_are_no_arguments_of_a_recipe(name):
    ours = {word for action in make_parser("p", "d")._actions for word in action.option_strings}
    theirs = {word for action in recipe_words.recipe_parser(name)._actions for word in action.option_strings}
    assert {"--nproc", "--accelerate_config"} <= ours
    assert "--ep_size" in theirs
    assert not ours & theirs


def test_recipe_arguments_are_parsed_before_the_launch(capsys, tmp_path):
    assert "--ep_sise in the command line" in refused(capsys, ["sft", *CPU, *NAMED, "--ep_sise", "2"])
    assert "--learning_rate" in refused(capsys, ["sft", *CPU, *NAMED, "--learning_rate", "fast"])
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: some/model\ndataset_name: some/data\nfsdp_turbo_ep_size: 2\n")
    said = refused(capsys, ["sft", *CPU, "--config", str(recipe)])
    assert "--fsdp_turbo_ep_size in the YAML of --config" in said
    assert "write ep_size here" in said
    recipe.write_text("env: {A: b}\nmodel_name_or_path: some/model\ndatasets: [{path: json}]\n")
    words = ["--config", str(recipe), "--ep-size", "2"]
    recipe_words.check_by_parser("sft", words, recipe_words.read_recipe(words))


def test_what_accelerate_refuses_is_said_too(capsys, tmp_path, unparsed):
    path = tmp_path / "a.yaml"
    path.write_text(shipped.launch_files()["cpu_ep2"].read_text() + "num_procesess: 4\n")
    assert "num_procesess" in refused(capsys, ["sft", "--accelerate_config", str(path), *NAMED])


def test_configs_lists_prints_and_copies(capsys, tmp_path):
    assert cli.main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.split("\n\n")[0].splitlines()] == list(shipped.launch_files())
    assert cli.main(["configs", "cuda_ep8"]) == 0
    assert capsys.readouterr().out == (ROOT / "accelerate_configs" / "cuda_ep8.yaml").read_text()
    assert cli.main(["configs", "cuda_ep8", "--out", str(tmp_path / "mine.yaml")]) == 0
    assert cli.main(["configs", "--out", str(tmp_path / "all")]) == 0
    assert {path.stem for path in (tmp_path / "all").iterdir()} == set(shipped.launch_files())
    capsys.readouterr()
    assert "exists" in refused(capsys, ["configs", "cuda_ep8", "--out", str(tmp_path / "mine.yaml")])


def test_setup_py_ships_the_folders_that_are_read():
    code = (ROOT / "setup.py").read_text(encoding="utf-8")
    folders = set(re.findall(r'"(\w+)": \("\*', code))
    assert folders == {shipped.LAUNCH_FILES, shipped.RECIPES, shipped.PAGES}
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    assert all(f"recursive-include {folder} " in manifest for folder in folders)


def test_a_rank_says_the_same(capsys):
    """The launcher's words are those of a rank's arguments: the check exists once."""
    from hf_fsdpturbo import FSDPTurboTrainingArguments

    for fields in ({"ep_dispatcher": "warp"}, {"hang_timeout": -1}, {"learning_rate": -1}, {"recompute": "some"}):
        said = refused(capsys, ["sft", *CPU, *NAMED, *(f"--{name}={value}" for name, value in fields.items())])
        with pytest.raises(ValueError, match=next(iter(fields))) as caught:
            FSDPTurboTrainingArguments("out", use_cpu=True, report_to="none", **fields)
        assert said.endswith(f"error: {caught.value}\n")


def test_a_model_that_is_neither_here_nor_in_the_cache(capsys, monkeypatch):
    monkeypatch.setattr(recipe_words, "offline", lambda: True)
    said = refused(capsys, ["sft", *CPU, *NAMED])
    assert "--model_name_or_path: there is no folder 'some/model'" in said
    assert "HF_HUB_OFFLINE=1" in said
    with pytest.raises(ValueError, match="no such argument"):  # another cache may be named: left to the ranks
        launch(*CPU, *NAMED, "--model_init_kwargs", '{"cache_dir": "x"}', "--ep_siez", "2")


def test_a_setting_of_the_recipe_counts_like_one_of_the_line(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    for text, said in (
        ("on_nonfinite: pray", "on_nonfinite must be one of"),
        ("ep_size: '01'", "--ep_size must be a whole number"),
        ("env: {FSDPTURBO_EP_DISPATCHER: warp}", "(from environment"),
        ("per_device_train_batch_size: 0", "per_device_train_batch_size must be a number of 1 or more"),
    ):
        recipe.write_text(text + "\n")
        assert said in refused(capsys, ["sft", *CPU, *NAMED, "--config", str(recipe)])
