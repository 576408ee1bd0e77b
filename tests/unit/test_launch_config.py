"""Finding and reading the accelerate YAML: command lines, refusals by name, and the real `accelerate launch`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.launch_config import launch_arguments, launcher, read_launch_config

ROOT = Path(__file__).parents[2]
HEAD = "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nnum_processes: 2\n"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("FSDPTURBO_", "ACCELERATE_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no default accelerate config but a test's own


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write an accelerate YAML and let the environment name it."""

    def make(rest="", kind="MULTI_GPU"):
        path = tmp_path / "config.yaml"
        path.write_text(HEAD.format(kind=kind) + rest)
        monkeypatch.setenv("FSDPTURBO_ACCELERATE_CONFIG", str(path))
        return path

    return make


def raises_naming(call, *words):
    with pytest.raises(ValueError, match=".") as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"


# ---- which process is the launcher ----

ARGUMENTS = ["--config_file", "a.yaml", "s.py"]
LAUNCH, MODULE = ["launch", *ARGUMENTS], ["accelerate.commands.launch", *ARGUMENTS]


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["/env/bin/python3.11", "/env/bin/accelerate", "launch", "--config_file", "a.yaml", "s.py"], True),
        (["/env/bin/accelerate", "launch", "--config_file", "a.yaml", "s.py"], True),
        (["python", "/env/bin/accelerate-launch", "--config_file", "a.yaml", "s.py"], True),
        (["C:\\accelerate.exe".rsplit("\\", 1)[1], "launch", "--config_file", "a.yaml", "s.py"], True),
        (["python", "-m", "accelerate.commands.launch", "--config_file", "a.yaml", "s.py"], True),
        (
            [
                "python",
                "-u",
                "-W",
                "ignore",
                "-X",
                "dev",
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                "a.yaml",
                "s.py",
            ],
            True,
        ),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "a.yaml", "s.py"], True),
        (["python", "/env/site-packages/accelerate/commands/launch.py", "--config_file", "a.yaml", "s.py"], True),
        (["python", "/env/bin/accelerate", "test"], False),
        (["python", "train.py", "accelerate", "launch"], False),
        (["python", "-c", "print()", "accelerate", "launch"], False),
        (["python", "-m", "torch.distributed.run", "accelerate", "launch"], False),
        (["bash", "-c", "accelerate launch --config_file a.yaml s.py"], False),
        (["uv", "run", "accelerate", "launch", "s.py"], False),
        (["python", "-m", "debugpy", "--listen", "5678", "--wait-for-client", "-m", *MODULE], True),
        (["python", "-m", "debugpy", "--configure-subProcess", "True", "--connect", "h:1", "-m", *MODULE], True),
        (["python", "/ide/debugpy/launcher/../../debugpy", "--connect", "1", "/env/bin/accelerate", *LAUNCH], True),
        (["python", "/ide/debugpy/__main__.py", "--listen", "5678", "/env/bin/accelerate-launch", *ARGUMENTS], True),
        (["coverage", "run", "-m", *MODULE], True),
        (["python", "/env/bin/coverage", "run", "-p", "--source", "pkg", "/env/bin/accelerate", *LAUNCH], True),
        (["python", "-m", "coverage", "run", "--rcfile=.rc", "--context", "x", "--module", *MODULE], True),
        (["python", "-m", "coverage", "run", "-m", "debugpy", "--listen", "1", "-m", *MODULE], True),
        (["coverage", "report", "-m", *MODULE], False),
        (["coverage", "run", "train.py", "accelerate", *LAUNCH], False),
        (["python", "-m", "debugpy", "--listen", "5678", "train.py", "-m", *MODULE], False),
        (["python", "-m", "debugpy", "--listen", "5678", "--pid", "12"], False),
        (["python", "-m", "debugpy", "-m"], False),
        (["python", "-m", "pytest", "-m", *MODULE], False),
        (["python", "-m"], False),
        (["python"], False),
        ([], False),
    ],
)
def test_the_launcher_is_recognised(argv, found):
    assert launch_arguments(argv) == (["--config_file", "a.yaml", "s.py"] if found else None)


class FakeProcess:
    def __init__(self, argv, cwd="/", error=None):
        self.argv, self.directory, self.error, self.pid = argv, cwd, error, 1

    def cmdline(self):
        if self.argv is None:
            raise self.error
        return self.argv

    def cwd(self):
        if self.error is not None:
            raise self.error
        return self.directory


def pretend_ancestors(monkeypatch, *processes):
    import psutil

    class Process:
        def parents(self):
            return list(processes)

    monkeypatch.setattr(psutil, "Process", Process)


def test_the_nearest_launcher_counts_and_unreadable_ancestors_do_not(monkeypatch):
    import psutil

    pretend_ancestors(
        monkeypatch,
        FakeProcess(["bash"]),
        FakeProcess(None, error=psutil.AccessDenied()),
        FakeProcess(["accelerate", "launch", "--config_file", "near.yaml", "s.py"], "/near"),
        FakeProcess(["accelerate", "launch", "--config_file", "far.yaml", "s.py"], "/far"),
    )
    assert launcher.nearest_accelerate() == (["--config_file", "near.yaml", "s.py"], "/near")
    pretend_ancestors(monkeypatch, FakeProcess(["bash"]))
    assert launcher.nearest_accelerate() is None
    assert read_launch_config() == launch_config.LaunchConfig()


def test_a_launcher_whose_directory_is_hidden_is_an_error(monkeypatch):
    import psutil

    pretend_ancestors(monkeypatch, FakeProcess(["accelerate", "launch", "s.py"], error=psutil.AccessDenied()))
    raises_naming(launcher.nearest_accelerate, "FSDPTURBO_ACCELERATE_CONFIG")


def under(monkeypatch, directory, *arguments):
    pretend_ancestors(monkeypatch, FakeProcess(["accelerate", "launch", *arguments], str(directory)))


def test_the_config_file_is_relative_to_the_launcher(monkeypatch, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.yaml").write_text(HEAD.format(kind="MULTI_GPU") + "fsdp_config: {fsdp_turbo_ep_size: 2}\n")
    for form in (["--config_file", "sub/c.yaml"], ["--config_file=sub/c.yaml"], ["--config-file", "sub/c.yaml"]):
        under(monkeypatch, tmp_path, *form, "--num_processes", "1", "s.py", "--config_file", "of_the_script.yaml")
        found = read_launch_config()
        assert found.path == str(tmp_path / "sub" / "c.yaml")
        assert found.fields == {"ep_size": 2}
    under(monkeypatch, tmp_path, "--config_file", "missing.yaml", "s.py")
    raises_naming(read_launch_config, "--config_file missing.yaml", tmp_path / "missing.yaml")


def test_the_environment_names_the_config_before_any_ancestor(monkeypatch, tmp_path, config):
    path = config("fsdp_config: {fsdp_turbo_ep_size: 4}\n")
    under(monkeypatch, tmp_path, "--config_file", "other.yaml", "s.py")
    assert read_launch_config().fields == {"ep_size": 4}
    monkeypatch.setenv("FSDPTURBO_ACCELERATE_CONFIG", "absent.yaml")
    raises_naming(read_launch_config, "FSDPTURBO_ACCELERATE_CONFIG=absent.yaml", "no such file")
    assert path.is_file()


def test_accelerates_default_file_is_used_where_accelerate_uses_it(monkeypatch, tmp_path):
    from accelerate.commands import config as accelerate_config

    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr(accelerate_config, "default_config_file", str(path))
    under(monkeypatch, tmp_path, "s.py")
    assert read_launch_config().path is None
    path.write_text(HEAD.format(kind="MULTI_GPU") + "fsdp_config: {fsdp_turbo_ep_size: 2}\n")
    assert read_launch_config().fields == {"ep_size": 2}
    under(monkeypatch, tmp_path, "--cpu", "s.py")
    assert read_launch_config().path is None


@pytest.mark.parametrize("flag", ["use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "tpu"])
def test_launcher_flags_that_give_the_model_away_are_refused(monkeypatch, tmp_path, flag):
    under(monkeypatch, tmp_path, f"--{flag}", "s.py")
    raises_naming(read_launch_config, f"--{flag}")


def test_a_launcher_of_another_release_is_an_error(monkeypatch, tmp_path, capsys):
    under(monkeypatch, tmp_path, "--mixed_precision", "int4", "s.py")
    raises_naming(read_launch_config, "int4", "FSDPTURBO_ACCELERATE_CONFIG")


def test_mixed_precision_of_the_command_beats_the_yaml(monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text(HEAD.format(kind="MULTI_GPU") + "mixed_precision: 'no'\n")
    under(monkeypatch, tmp_path, "--config_file", "c.yaml", "--mixed_precision", "bf16", "s.py")
    assert read_launch_config().mixed_precision == "bf16"
    under(monkeypatch, tmp_path, "--mixed_precision", "bf16", "s.py")
    assert read_launch_config().mixed_precision == "bf16"


# ---- what the YAML says ----


def test_our_keys_and_use_cpu_are_read(config):
    path = config("use_cpu: true\nmixed_precision: bf16\nfsdp_config:\n  fsdp_turbo_dist_config: {ep_size: 2}\n")
    found = read_launch_config()
    assert found.fields == {"dist_config": {"ep_size": 2}}
    assert (found.use_cpu, found.mixed_precision, found.path) == (True, "bf16", str(path))
    config()
    assert read_launch_config().mixed_precision is None


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "MULTI_XPU", "MULTI_CPU", "TP"])
def test_foreign_distributed_types_are_refused(config, kind):
    path = config(kind=kind)
    raises_naming(read_launch_config, "distributed_type" if kind != "TP" else "cannot be read", kind, path)


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_NPU", "'NO'"])
def test_usable_distributed_types_pass(config, kind):
    config(kind=kind)
    read_launch_config()


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("fsdp_config: {fsdp_version: 2}\n", ["fsdp_version=2", "accelerate's own"]),
        ("fsdp_config: {fsdp_turbo_ep_size: 2, fsdp_offload_params: true}\n", ["fsdp_offload_params=True"]),
        ("fsdp_config: {turbo_ep_size: 2}\n", ["turbo_ep_size"]),
        ("parallelism_config: {parallelism_config_cp_size: 2}\n", ["parallelism_config", "cp_size"]),
        ("deepspeed_config: {zero_stage: 3}\n", ["deepspeed_config", "zero_stage"]),
        ("megatron_lm_config: {megatron_lm_tp_degree: 2}\n", ["megatron_lm_config", "tp_degree"]),
        ("dynamo_config: {dynamo_backend: INDUCTOR}\n", ["dynamo_backend=INDUCTOR", "torch_compile"]),
        ("mixed_precision: fp16\n", ["mixed_precision=fp16", "bf16"]),
        ("mixed_precision: fp8\n", ["mixed_precision=fp8", "bf16"]),
        ("use_cpu: 'yes'\n", ["use_cpu", "'yes'"]),
        ("ep_size: 2\n", ["ep_size", "cannot be read"]),
        ("fsdp_config: [\n", ["cannot be read"]),
    ],
)
def test_what_cannot_be_honoured_names_key_value_and_file(config, rest, words):
    path = config(rest)
    raises_naming(read_launch_config, path, *words)


def test_sagemaker_is_refused(config):
    path = config()
    head = "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
    path.write_text(head + "ec2_instance_type: x\niam_role_name: y\n")
    raises_naming(read_launch_config, "compute_environment", path)


# ---- the environment ----


def test_ranks_come_from_the_launcher(monkeypatch):
    assert (launch_config.world_size(), launch_config.rank(), launch_config.local_rank()) == (1, 0, 0)
    for name, value in (("WORLD_SIZE", "8"), ("RANK", "5"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert (launch_config.world_size(), launch_config.rank(), launch_config.local_rank()) == (8, 5, 1)
    assert launch_config.local_world_size() == 4
    monkeypatch.setenv("WORLD_SIZE", "eight")
    raises_naming(launch_config.world_size, "WORLD_SIZE", "'eight'")


def test_variables_are_set_and_restored(monkeypatch):
    monkeypatch.setenv("FSDPTURBO_TEST_A", "before")
    with launch_config.variables(FSDPTURBO_TEST_A="inside", FSDPTURBO_TEST_B="new"):
        assert launch_config.variable("FSDPTURBO_TEST_A") == "inside"
        assert launch_config.variable("FSDPTURBO_TEST_B") == "new"
    assert launch_config.variable("FSDPTURBO_TEST_A") == "before"
    assert launch_config.variable("FSDPTURBO_TEST_B") is None


# ---- the real thing ----

SCRIPT = """
import json, sys
from hf_fsdpturbo.arguments import FSDPTurboTrainingArguments, sizes_for_world
args = FSDPTurboTrainingArguments(output_dir=sys.argv[1], report_to="none")
found = args._fsdpturbo.launch
line = dict(rank=args.process_index, world=args.world_size, ep=args.ep_size, cpu=args.use_cpu, path=found.path,
            trl="trl" in sys.modules, sizes=sizes_for_world(args, args.world_size))
open(f"{sys.argv[1]}/{args.process_index}.json", "w").write(json.dumps(line))
"""


def launch(tmp_path, command, directory, **environment):
    """Run a small script under a launcher; returns what each rank wrote, by rank, and the output."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "hf"),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "script.py"), str(out)],
        cwd=directory, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    ranks = {path.stem: json.loads(path.read_text()) for path in sorted(out.iterdir())}
    return ranks, done.stdout + done.stderr


ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]


@pytest.fixture
def cpu_yaml(tmp_path):
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "cpu.yaml"
    path.write_text((ROOT / "accelerate_configs" / "cpu_ep2.yaml").read_text() + "main_process_port: 0\n")
    return path


def test_accelerate_launch_with_two_processes_and_a_relative_path(tmp_path, cpu_yaml):
    ranks, output = launch(tmp_path, [*ACCELERATE, "--config_file", "configs/cpu.yaml"], tmp_path)
    assert sorted(ranks) == ["0", "1"], output
    for rank, seen in ranks.items():
        assert seen["path"] == str(cpu_yaml)
        assert (seen["rank"], seen["world"], seen["ep"], seen["cpu"], seen["trl"]) == (int(rank), 2, 2, True, False)
        assert seen["sizes"]["ep_size"] == 2


@pytest.mark.parametrize("runner", [
    ["-m", "coverage", "run"], ["-m", "debugpy", "--configure-subProcess", "False", "--listen", "127.0.0.1:0"],
], ids=["coverage", "debugpy"])  # fmt: skip
def test_accelerate_launch_under_a_debugger_or_coverage(tmp_path, cpu_yaml, runner):
    installed = Path(pytest.importorskip(runner[1]).__file__).parents[1]
    command = [*runner, *ACCELERATE, "--config_file", "configs/cpu.yaml"]
    ranks, output = launch(tmp_path, command, tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{installed}")
    assert [seen["ep"] for seen in ranks.values()] == [2, 2], output


def test_accelerate_launch_with_one_process(tmp_path, cpu_yaml):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    ranks, output = launch(tmp_path, [*command, "--config_file", str(cpu_yaml), "--num_processes", "1"], tmp_path)
    assert list(ranks) == ["0"], output
    assert (ranks["0"]["world"], ranks["0"]["ep"], ranks["0"]["path"]) == (1, 1, str(cpu_yaml))
    assert output.count("One process: ep_size=2") == 1


@pytest.mark.skipif("__import__('torch').accelerator.is_available()", reason="needs a machine without an accelerator")
def test_two_processes_that_train_alone_are_refused_on_every_rank(tmp_path, cpu_yaml):
    cpu_yaml.write_text(cpu_yaml.read_text().replace("use_cpu: true", "use_cpu: false"))
    ranks, output = launch(tmp_path, [*ACCELERATE, "--config_file", str(cpu_yaml)], tmp_path)
    assert ranks == {}
    assert "WORLD_SIZE=2" in output
    assert "use_cpu" in output


def test_fsdp_in_the_yaml_is_refused_under_accelerate_launch(tmp_path, cpu_yaml):
    text = cpu_yaml.read_text().replace("MULTI_GPU\n", "FSDP\n").replace("fsdp_turbo_ep_size: 2", "fsdp_version: 2")
    cpu_yaml.write_text(text)
    ranks, output = launch(tmp_path, [*ACCELERATE, "--config_file", str(cpu_yaml), "--num_processes", "1"], tmp_path)
    assert ranks == {}
    assert "distributed_type=FSDP" in output
