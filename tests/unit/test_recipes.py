"""Every YAML in recipes/ parses strictly with the script it is for, and a key nobody knows is an error."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = sorted(RECIPES.glob("*.py"))
YAMLS = sorted(RECIPES.glob("*.yaml"))


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script_of(path: Path) -> ModuleType:
    """A YAML belongs to the script in its name: `demo_dpo.yaml` to `dpo.py`, `sft_vlm.yaml` to `sft.py`."""
    (script,) = (script for script in SCRIPTS if script.stem in path.stem.split("_"))
    return load_script(script)


def test_there_is_something_to_check():
    assert RECIPES / "demo_sft.yaml" in YAMLS
    assert RECIPES / "sft.py" in SCRIPTS


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_recipe_parses(path: Path, tmp_path: Path):
    script = script_of(path)
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    script_args, training_args, model_args, _ = script.make_parser().parse_args_and_config(arguments)
    given = yaml.safe_load(path.read_text())
    assert model_args.model_name_or_path == given["model_name_or_path"]
    assert script_args.dataset_name == given["dataset_name"]
    assert training_args.learning_rate == given["learning_rate"]
    assert type(training_args).__name__.startswith("FSDPTurbo")


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_an_unknown_key_is_an_error(path: Path, tmp_path: Path):
    recipe = tmp_path / path.name
    recipe.write_text(path.read_text() + "\nep_sise: 2\n")
    arguments = ["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    with pytest.raises(ValueError, match="ep_sise"):
        script_of(path).make_parser().parse_args_and_config(arguments)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_takes_our_fields_and_refuses_unknown_ones(path: Path, tmp_path: Path):
    parser = load_script(path).make_parser()
    common = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--model_name_or_path", "some/model"]
    arguments = [*common, "--ep_size", "1", "--ep_dispatcher", "fused"]
    _, training_args, model_args, _ = parser.parse_args_and_config(arguments)
    assert (training_args.ep_size, training_args.ep_dispatcher) == (1, "fused")
    assert model_args.model_name_or_path == "some/model"
    with pytest.raises(ValueError, match="ep_sise"):
        load_script(path).make_parser().parse_args_and_config([*common, "--ep_sise", "1"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("ep_sise: 2\n")
    with pytest.raises(ValueError, match="ep_sise"):
        load_script(path).make_parser().parse_args_and_config([*common, "--config", str(recipe)])


def test_sft_recipe_takes_a_json_file_and_a_folder(tmp_path: Path):
    """TRL's two ways to name a dataset, offline."""
    sft = load_script(RECIPES / "sft.py")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    common = ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]

    script_args, _, _, mixture = sft.make_parser().parse_args_and_config(["--dataset_name", str(tmp_path), *common])
    splits = sft.load_splits(script_args, mixture, 7)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 2, "test": 2}

    recipe = tmp_path / "mixture_sft.yaml"
    recipe.write_text(yaml.safe_dump({"datasets": [{"path": "json", "data_files": str(tmp_path / "train.jsonl")}]}))
    script_args, _, _, mixture = sft.make_parser().parse_args_and_config(["--config", str(recipe), *common])
    assert len(sft.load_splits(script_args, mixture, 7)["train"]) == 2

    with pytest.raises(ValueError, match="No dataset"):
        sft.load_splits(*sft.make_parser().parse_args_and_config(common)[::3], 7)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_all_ranks_draw_one_split(path: Path, tmp_path: Path):
    """S7: `test_split_size` is drawn from the process's random state, which differs from rank to rank."""
    import numpy

    script = load_script(path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(40)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({"datasets": [{"path": "json", "data_files": str(rows)}], "test_split_size": 0.25})
    )
    common = ["--config", str(recipe), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    script_args, _, _, mixture = script.make_parser().parse_args_and_config(common)
    drawn = []
    for state in (1, 2):
        numpy.random.seed(state)
        drawn.append(script.load_splits(script_args, mixture, 7)["test"]["text"][:])
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 10


@pytest.mark.parametrize(
    ("text", "rest", "words"),
    [
        ("ep_size: 2\nep_size: 4\n", [], ("line 2", "ep_size", "more than once")),
        ("ep_size: 010\n", [], ("line 1", "ep_size", "'010' as 8")),
        ("[1, 2]\n", [], ("must be a mapping",)),
        ("max_steps: 1\n", ["--ep_siz", "2"], ("--ep_siz",)),
        ("max_steps: 1\n", ["--ep_size", "1_0"], ("--ep_size", "'1_0'")),
    ],
)
def test_what_would_be_read_otherwise_than_written(tmp_path: Path, text: str, rest: list[str], words: tuple[str, ...]):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    parser = load_script(SCRIPTS[0]).make_parser()
    with pytest.raises(ValueError, match=".") as caught:
        parser.parse_args_and_config(["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "1", *rest])
    assert all(word in str(caught.value) for word in words), caught.value


def test_data_that_cannot_be_read_is_named(tmp_path):
    """By the argument; ``datasets`` says that "an error occurred", and of an empty file only StopIteration."""
    import trl

    from hf_fsdpturbo.commands.data_file import with_file
    from hf_fsdpturbo.commands.recipe import named_splits

    for content, words in ((b'{"text": "a', "JSON"), (b"", "rows.jsonl"), (b"1\n2\n", "rows.jsonl")):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        both = with_file(trl.ScriptArguments(dataset_name=str(path)), trl.DatasetMixtureConfig())
        with pytest.raises(ValueError, match=words) as caught:
            named_splits(str(path), *both, 7)
        assert "dataset_name='" in str(caught.value)
