"""Configuration: strict parsing, precedence between sources, copies, and what one process makes of big sizes."""

import copy
import dataclasses
import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
from transformers import HfArgumentParser

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments import (
    FSDPTurboParams,
    FSDPTurboTrainingArguments,
    InitParams,
    KernelParams,
    bf16_storage_warning,
    describe_sources,
    sizes_for_world,
    sources,
    turbo_arguments,
)

YAML_HEAD = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("FSDPTURBO_", "ACCELERATE_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(turbo_arguments, "_warned", set())


@pytest.fixture
def build(tmp_path):
    def make(**kwargs):
        return FSDPTurboTrainingArguments(
            **{"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **kwargs}
        )

    return make


@pytest.fixture
def accelerate_yaml(tmp_path, monkeypatch):
    """Write an accelerate YAML with our fields and let the environment name it."""

    def make(fields, head=YAML_HEAD):
        path = tmp_path / "accelerate.yaml"
        path.write_text(
            head + "fsdp_config:\n" + "".join(f"  fsdp_turbo_{k}: {json.dumps(v)}\n" for k, v in fields.items())
        )
        monkeypatch.setenv("FSDPTURBO_ACCELERATE_CONFIG", str(path))
        return path

    return make


def pretend_world(monkeypatch, size):
    """Arguments of a run of ``size`` processes, without starting them."""
    monkeypatch.setattr(launch_config, "world_size", lambda: size)
    monkeypatch.setattr(FSDPTurboTrainingArguments, "world_size", property(lambda self: size))


def raises_naming(call, *words):
    with pytest.raises(ValueError, match=".") as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"
    return str(caught.value)


# ---- the tables of the spec ----


def test_defaults_are_those_of_the_spec(build):
    args = build()
    assert args.fsdpturbo_params == FSDPTurboParams()
    assert dataclasses.asdict(FSDPTurboParams()) == {
        "name": "fsdpturbo",
        "reshard_after_forward": True,
        "offload_params": False,
        "pin_memory": True,
        "dcp_path": None,
        "ep_size": 1,
        "ep_dispatcher": "eager",
        "fsdp_ignored_modules": [],
        "hook_modules": [],
        "fsdp_implementation": "native",
        "efsdp_size": None,
        "ep_backend": "torch",
        "param_storage_dtype": "auto",
    }
    assert (args.dp_size, args.cp_size, args.cp_mode, args.mp_replicate_size, args.mp_shard_size) == (
        None,
        1,
        "ulysses",
        1,
        None,
    )
    assert (args.dist_timeout, args.ddp_timeout) == (None, 1800)
    assert args.kernel_params is None
    assert args.init_params == InitParams("init_on_meta")


def test_field_defaults_match_the_table_that_merging_uses():
    ours = {f.name: f for f in dataclasses.fields(FSDPTurboTrainingArguments) if f.name in sources.PUBLIC_DEFAULTS}
    assert set(ours) == set(sources.PUBLIC_DEFAULTS)
    for name, field in ours.items():
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        assert default == sources.PUBLIC_DEFAULTS[name], name


def test_importing_the_arguments_imports_no_heavy_package():
    code = (
        "import sys, hf_fsdpturbo.arguments as a; print([m for m in ('torch', 'transformers', 'trl', 'accelerate') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.strip() == "[]"


# ---- strict parsing of dist_config ----

EVERY_FORM = {"ep_size": 2, "ep_dispatcher": "fused", "fsdp_ignored_modules": ["model.embed"]}


def test_a_mapping_a_json_string_and_files_mean_the_same(build, tmp_path, monkeypatch):
    pretend_world(monkeypatch, 2)
    yaml_path, json_path = tmp_path / "dist.yaml", tmp_path / "dist.json"
    yaml_path.write_text("ep_size: 2\nep_dispatcher: fused\nfsdp_ignored_modules: [model.embed]\n")
    json_path.write_text(json.dumps(EVERY_FORM))
    expected = FSDPTurboParams(**EVERY_FORM)
    for form in (EVERY_FORM, json.dumps(EVERY_FORM), str(yaml_path), str(json_path)):
        assert build(dist_config=form).fsdpturbo_params == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ep_size", True),
        ("ep_size", 2.0),
        ("ep_size", "2"),
        ("ep_size", 0),
        ("ep_size", -4),
        ("ep_size", None),
        ("efsdp_size", 0),
        ("efsdp_size", False),
        ("ep_dispatcher", "fast"),
        ("ep_dispatcher", "Eager"),
        ("reshard_after_forward", 1),
        ("reshard_after_forward", "true"),
        ("dcp_path", 3),
        ("fsdp_ignored_modules", "model.embed"),
        ("fsdp_ignored_modules", [1]),
        ("hook_modules", None),
        ("fsdp_implementation", "other"),
        ("ep_backend", "upstream"),
        ("param_storage_dtype", "float16"),
        ("name", "fsdp2"),
    ],
)
def test_a_wrong_value_names_field_and_value(build, key, value):
    raises_naming(lambda: build(dist_config={key: value}), f"dist_config {key}", repr(value))
    raises_naming(lambda: FSDPTurboParams(**{key: value}), key, repr(value))


def test_an_unknown_key_lists_the_valid_ones(build):
    message = raises_naming(lambda: build(dist_config={"ep_sise": 2}), "ep_sise", "dist_config", "efsdp_size")
    assert message.startswith("Unknown params")


@pytest.mark.parametrize(
    "key", ["dp_size", "cp_size", "cp_mode", "mp_replicate_size", "mp_shard_size", "ranks_per_node", "dist_timeout"]
)
def test_a_topology_field_inside_dist_config_says_where_it_belongs(build, key):
    message = raises_naming(lambda: build(dist_config={key: 1}), "Unknown params", key, f"--{key}")
    assert f"{key} is a training argument" in message


@pytest.mark.parametrize("key", ["ep_modules", "ep_fsdp_modules"])
def test_module_patterns_belong_to_a_model_spec(build, key, monkeypatch):
    hint = "FSDPTurboEPModelSpec.register"
    raises_naming(lambda: build(dist_config={key: ["x"]}), "Unknown params", key, hint)
    raises_naming(lambda: build(kernel_config={"name": "auto", key: ["x"]}), "Unknown params", key, hint)
    raises_naming(lambda: build(init_config={key: ["x"]}), "Unknown params", key, hint)
    monkeypatch.setenv(f"FSDPTURBO_{key.upper()}", "x")
    raises_naming(build, "Unknown params", f"FSDPTURBO_{key.upper()}", hint)


def test_a_private_field_outside_dist_config_says_where_it_belongs(build, accelerate_yaml):
    accelerate_yaml({"efsdp_size": 2})
    raises_naming(build, "Unknown params", "fsdp_turbo_efsdp_size", "inside dist_config", "fsdp_turbo_ep_size")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_file.yaml", ["no_such_file.yaml", "no such file"]),
        ("eager", ["'eager'", "JSON", ".yaml"]),
        ("{ep_size: 2}", ["not valid JSON"]),
        ('{"ep_size": 2, "ep_size": 4}', ["ep_size", "more than once"]),
        ([1], ["dist_config", "mapping", "[1]"]),
        ({1: 2}, ["dist_config", "key 1", "strings"]),
        ({"dcp_path": object()}, ["dist_config dcp_path", "JSON"]),
        (7, ["dist_config", "7"]),
    ],
)
def test_what_is_no_mapping_is_an_error(build, value, words):
    raises_naming(lambda: build(dist_config=value), *words)


@pytest.mark.parametrize(
    ("text", "word"),
    [("ep_size: 2\nep_size: 4\n", "more than once"), ("- 1\n", "mapping"), ("a: [", "cannot be read")],
)
def test_a_bad_file_names_the_file(build, tmp_path, text, word):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    raises_naming(lambda: build(dist_config=str(path)), "dist_config", word)


@pytest.mark.parametrize(
    "name", ["ep_size", "dp_size", "cp_size", "mp_replicate_size", "mp_shard_size", "dist_timeout"]
)
@pytest.mark.parametrize("value", [True, 2.0, "2", 0, -1])
def test_sizes_are_positive_integers(build, name, value):
    raises_naming(lambda: build(**{name: value}), name, value)


def test_cp_mode_has_one_value(build):
    raises_naming(lambda: build(cp_mode="ring"), "cp_mode", "'ring'", "ulysses")


@pytest.mark.parametrize("value", ["some", True, 1, ""])
def test_check_loading_has_three_values(build, value):
    raises_naming(lambda: build(check_loading=value), "check_loading", repr(value), "sample", "full", "off")


@pytest.mark.parametrize("value", ["ignore", True, False, ""])
def test_on_nonfinite_has_three_values(build, value):
    raises_naming(lambda: build(on_nonfinite=value), "on_nonfinite", repr(value), "warn", "skip", "stop")


def test_on_nonfinite_comes_from_every_source(build, accelerate_yaml, monkeypatch):
    assert build().on_nonfinite == "warn"
    accelerate_yaml({"on_nonfinite": "skip"})
    assert build().on_nonfinite == "skip"
    monkeypatch.setenv("FSDPTURBO_ON_NONFINITE", "stop")
    assert build().on_nonfinite == "stop"
    assert build(on_nonfinite="warn").on_nonfinite == "warn"


def test_fsdpturbo_metrics_comes_from_every_source(build, accelerate_yaml, monkeypatch):
    assert build().fsdpturbo_metrics is None
    accelerate_yaml({"fsdpturbo_metrics": False})
    assert build().fsdpturbo_metrics is False
    monkeypatch.setenv("FSDPTURBO_FSDPTURBO_METRICS", "true")
    assert build().fsdpturbo_metrics is True
    assert build(fsdpturbo_metrics=False).fsdpturbo_metrics is False
    raises_naming(lambda: build(fsdpturbo_metrics="some"), "fsdpturbo_metrics", "'some'")
    parse = HfArgumentParser(FSDPTurboTrainingArguments).parse_args_into_dataclasses
    (parsed,) = parse(["--output_dir", "x", "--use_cpu", "true", "--fsdpturbo_metrics", "false"])
    assert parsed.fsdpturbo_metrics is False


def test_check_loading_comes_from_every_source(build, accelerate_yaml, monkeypatch):
    """YAML reads a bare off as false."""
    assert build().check_loading == "sample"
    accelerate_yaml({"check_loading": False})
    assert build().check_loading == "off"
    monkeypatch.setenv("FSDPTURBO_CHECK_LOADING", "full")
    assert build().check_loading == "full"
    assert build(check_loading="sample").check_loading == "sample"
    assert build(check_loading=False).check_loading == "off"
    (parsed,) = HfArgumentParser(FSDPTurboTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "x", "--use_cpu", "true", "--check_loading", "off"]
    )
    assert parsed.check_loading == "off"
    assert dataclasses.replace(parsed).check_loading == "off"


@pytest.mark.parametrize("value", ["fused", True, "", "own"])
def test_optim_implementation_has_three_values(build, value):
    raises_naming(lambda: build(optim_implementation=value), "optim_implementation", repr(value), "auto", "torch")


def test_optim_implementation_comes_from_every_source_and_fits_optim(build, accelerate_yaml, monkeypatch):
    assert build().optim_implementation == "auto"
    accelerate_yaml({"optim_implementation": "torch"})
    assert build().optim_implementation == "torch"
    monkeypatch.setenv("FSDPTURBO_OPTIM_IMPLEMENTATION", "fsdpturbo")
    assert build().optim_implementation == "fsdpturbo"
    assert build(optim="adamw_torch").optim_implementation == "fsdpturbo"
    raises_naming(lambda: build(optim="sgd"), "optim_implementation='fsdpturbo'", "'sgd'", "adamw_torch")
    assert build(optim="sgd", optim_implementation="auto").optim_implementation == "auto"


@pytest.mark.parametrize("value", ["some", True, 1, "", "Full"])
def test_recompute_has_two_values(build, value):
    raises_naming(lambda: build(recompute=value), "recompute", repr(value), "full", "selective")


def test_recompute_comes_from_every_source(build, accelerate_yaml, monkeypatch):
    assert build().recompute == "full"
    accelerate_yaml({"recompute": "selective"})
    assert build().recompute == "selective"
    assert build(recompute="full").recompute == "full"
    monkeypatch.setenv("FSDPTURBO_RECOMPUTE", "full")
    assert build().recompute == "full"
    (parsed,) = HfArgumentParser(FSDPTurboTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "x", "--use_cpu", "true", "--recompute", "selective"]
    )
    assert parsed.recompute == "selective"
    assert dataclasses.replace(parsed).recompute == "selective"


def test_recompute_without_checkpointing_is_said(build, caplog):
    build(recompute="selective", activation_checkpointing=True)
    assert "recompute" not in caplog.text
    build(recompute="selective")
    assert "recompute='selective' has no effect without activation_checkpointing" in caplog.text


def test_recompute_needs_our_own_experts(build):
    backend = {"name": "fsdpturbo", "ep_backend": "fsdp_turbo"}
    raises_naming(lambda: build(recompute="selective", dist_config=backend), "recompute", "'selective'", "ep_backend")


@pytest.mark.parametrize("value", ["fused", 1, "", "true"])
def test_fused_linear_cross_entropy_has_three_values(build, value):
    raises_naming(
        lambda: build(fused_linear_cross_entropy=value), "fused_linear_cross_entropy", repr(value), "auto", "on", "off"
    )


def test_fused_linear_cross_entropy_comes_from_every_source(build, accelerate_yaml, monkeypatch):
    """YAML reads a bare on as true."""
    assert build().fused_linear_cross_entropy == "auto"
    accelerate_yaml({"fused_linear_cross_entropy": True})
    assert build().fused_linear_cross_entropy == "on"
    monkeypatch.setenv("FSDPTURBO_FUSED_LINEAR_CROSS_ENTROPY", "off")
    assert build().fused_linear_cross_entropy == "off"
    args = build(fused_linear_cross_entropy="auto")
    assert dataclasses.replace(args).fused_linear_cross_entropy == "auto"


# ---- kernel_config and init_config ----


def test_kernel_config_is_parsed(build):
    config = {
        "name": "auto, flash-linear-attention",
        "include_kernels": "chunk_gated_delta_rule, fused_recurrent_gated_delta_rule",
        "chunk_size": 16,
    }
    args = build(kernel_config=config)
    both = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
    assert args.kernel_params == KernelParams(["auto", "flash-linear-attention"], both, 16)
    assert args.kernel_config == config
    for everything in ("auto", True):
        params = build(kernel_config={"name": "flash-linear-attention", "include_kernels": everything}).kernel_params
        assert params == KernelParams(["flash-linear-attention"], None, 64)


FLA = {"name": "flash-linear-attention"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["kernel_config", "name"]),
        ({"name": "turbo"}, ["kernel_config name", "'turbo'", "liger"]),
        ({"name": ""}, ["kernel_config name", "nothing"]),
        ({"name": "auto,,liger"}, ["kernel_config name", "''"]),
        ({"name": "auto, auto"}, ["kernel_config name", "twice"]),
        ({"name": ["auto"]}, ["kernel_config name", "['auto']"]),
        ({**FLA, "include_kernels": ""}, ["include_kernels", "nothing"]),
        ({**FLA, "include_kernels": False}, ["include_kernels", "False"]),
        ({**FLA, "include_kernels": "chunk_kda"}, ["include_kernels", "'chunk_kda'", "chunk_gated_delta_rule"]),
        ({**FLA, "chunk_size": 48}, ["chunk_size", "48", "(16, 32, 64)"]),
        ({**FLA, "chunk_size": True}, ["chunk_size", "True"]),
        ({**FLA, "chunk_size": "64"}, ["chunk_size", "'64'"]),
        ({"name": "auto", "chunk_size": 64}, ["chunk_size", "64", "flash-linear-attention"]),
        ({"name": "liger", "include_kernels": "auto"}, ["include_kernels", "flash-linear-attention"]),
        ({"name": "auto", "chunk": 64}, ["Unknown params", "chunk", "chunk_size"]),
    ],
)
def test_a_bad_kernel_config_is_an_error(build, config, words):
    raises_naming(lambda: build(kernel_config=config), *words)


@pytest.mark.parametrize(
    "config",
    [{**FLA, "chunk_size": 48}, {"name": "fla"}, {"name": ["auto"]}, {"chunk_size": 16}, {**FLA, "chunk_size": "64"},
     {"name": ""}, {"name": "auto, auto"}, {"name": "auto", "chunk_size": 64}],
    ids=str,
)  # fmt: skip
def test_an_error_of_kernel_config_ends_with_what_to_do(build, config):
    with pytest.raises(ValueError, match="kernel_config") as caught:
        build(kernel_config=config)
    last = str(caught.value).rsplit(". ", 1)[-1]
    assert last.split()[0] in ("Use", "Add", "Write", "Correct", "Name", "Leave"), str(caught.value)
    assert str(caught.value).count("kernel_config") == 1


def test_init_config(build):
    assert build(init_config={"name": "init_on_rank0"}).init_params.name == "init_on_rank0"
    raises_naming(lambda: build(init_config={"name": "init_on_disk"}), "init_config name", "'init_on_disk'")
    raises_naming(lambda: build(init_config={"mode": "init_on_meta"}), "Unknown params", "mode")


# ---- the parsers people use ----


def test_the_command_line_takes_json_and_paths(tmp_path):
    path = tmp_path / "kernels.yaml"
    path.write_text("name: auto\n")
    base = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none"]
    extra = ["--ep_dispatcher", "fused", "--dist_config", '{"ep_size": 1}', "--kernel_config", str(path)]
    (args,) = HfArgumentParser(FSDPTurboTrainingArguments).parse_args_into_dataclasses([*base, *extra])
    assert (args.fsdpturbo_params.ep_dispatcher, args.kernel_params.name) == ("fused", ["auto"])
    (args,) = HfArgumentParser(FSDPTurboTrainingArguments).parse_args_into_dataclasses(base)
    assert args.init_config == {"name": "init_on_meta"}


def test_a_trl_recipe_takes_a_nested_mapping(tmp_path):
    from trl import TrlParser

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nreport_to: none\ninit_config:\n  name: init_on_default\n"
        "dist_config:\n  ep_dispatcher: domino\n  fsdp_ignored_modules: [a, b]\n"
    )
    (args,) = TrlParser(FSDPTurboTrainingArguments).parse_args_and_config(["--config", str(recipe)])
    assert args.fsdpturbo_params == FSDPTurboParams(ep_dispatcher="domino", fsdp_ignored_modules=["a", "b"])
    assert args.init_params.name == "init_on_default"
    recipe.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nep_size: true\n")
    raises_naming(
        lambda: TrlParser(FSDPTurboTrainingArguments).parse_args_and_config(["--config", str(recipe)]), "ep_size"
    )


# ---- sources ----


def test_shorthand_and_dist_config_agree_or_raise(build, accelerate_yaml, monkeypatch):
    pretend_world(monkeypatch, 2)
    assert build(ep_size=2, dist_config={"ep_size": 2}).fsdpturbo_params.ep_size == 2
    assert build(ep_dispatcher="fused").fsdpturbo_params.ep_dispatcher == "fused"
    raises_naming(lambda: build(ep_size=2, dist_config={"ep_size": 4}), "ep_size=2", "ep_size=4", "Python")
    raises_naming(
        lambda: build(ep_dispatcher="fused", dist_config={"ep_dispatcher": "eager"}),
        "ep_dispatcher",
        "'fused'",
        "'eager'",
    )
    path = accelerate_yaml({"ep_size": 2, "dist_config": {"ep_size": 4}})
    raises_naming(build, "ep_size=2", "ep_size=4", path)
    monkeypatch.delenv("FSDPTURBO_ACCELERATE_CONFIG")
    monkeypatch.setenv("FSDPTURBO_EP_SIZE", "2")
    monkeypatch.setenv("FSDPTURBO_DIST_CONFIG", '{"ep_size": 4}')
    raises_naming(build, "ep_size=2", "ep_size=4", "environment")


def test_precedence_goes_key_by_key(build, accelerate_yaml, monkeypatch):
    pretend_world(monkeypatch, 16)
    accelerate_yaml(
        {"ep_size": 8, "dist_config": {"param_storage_dtype": "bfloat16", "pin_memory": False}, "dp_size": 16}
    )
    assert build().ep_size == 8
    monkeypatch.setenv("FSDPTURBO_EP_SIZE", "4")
    monkeypatch.setenv("FSDPTURBO_EP_DISPATCHER", "fused")
    args = build(ep_size=2)
    assert args.fsdpturbo_params == FSDPTurboParams(
        ep_size=2, ep_dispatcher="fused", param_storage_dtype="bfloat16", pin_memory=False
    )
    assert build().ep_size == 4
    text = describe_sources(args)
    by_source = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert "dist_config.ep_size=2" in by_source["command line / Python"]
    assert "dist_config.ep_dispatcher='fused'" in by_source["environment"]
    assert "dist_config.param_storage_dtype='bfloat16'" in by_source["accelerate YAML"]
    assert "dp_size=16" in by_source["accelerate YAML"]


BIGGER = {"cp_size": 2, "mp_replicate_size": 2, "init_config": {"name": "init_on_rank0"}}
DEFAULTS = {"cp_size": 1, "mp_replicate_size": 1, "init_config": {"name": "init_on_meta"}}


def in_force(args):
    return {name: getattr(args, name) for name in BIGGER}


@pytest.mark.parametrize("name", BIGGER)
def test_a_value_equal_to_the_default_wins_over_environment_and_yaml(build, accelerate_yaml, monkeypatch, name):
    pretend_world(monkeypatch, 4)
    accelerate_yaml(BIGGER)
    assert in_force(build()) == BIGGER
    assert in_force(build(**{name: DEFAULTS[name]})) == {**BIGGER, name: DEFAULTS[name]}
    monkeypatch.delenv("FSDPTURBO_ACCELERATE_CONFIG")
    for field, value in BIGGER.items():
        monkeypatch.setenv(f"FSDPTURBO_{field.upper()}", json.dumps(value))
    args = build(**{name: DEFAULTS[name]})
    assert in_force(args) == {**BIGGER, name: DEFAULTS[name]}
    assert f"command line / Python: {name}={DEFAULTS[name]!r}\n" in describe_sources(args)
    for other in (dataclasses.replace(args), copy.deepcopy(args), FSDPTurboTrainingArguments(**args.to_dict())):
        assert describe_sources(other) == describe_sources(args)


def test_a_value_equal_to_the_default_wins_from_the_command_line_and_a_recipe(tmp_path, accelerate_yaml, monkeypatch):
    from trl import TrlParser

    pretend_world(monkeypatch, 4)
    accelerate_yaml(BIGGER)
    base = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none"]
    given = [["--" + name, value if isinstance(value, str) else json.dumps(value)] for name, value in DEFAULTS.items()]
    parse = HfArgumentParser(FSDPTurboTrainingArguments).parse_args_into_dataclasses
    assert in_force(parse(base)[0]) == BIGGER
    assert in_force(parse([*base, *sum(given, [])])[0]) == DEFAULTS
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nreport_to: none\ncp_size: 1\n")
    (args,) = TrlParser(FSDPTurboTrainingArguments).parse_args_and_config(["--config", str(recipe)])
    assert in_force(args) == {**BIGGER, "cp_size": 1}
    assert "(default: 1800)" in HfArgumentParser(FSDPTurboTrainingArguments).format_help()


def test_a_subclass_that_sets_another_default_gives_it(tmp_path, accelerate_yaml, monkeypatch):
    @dataclasses.dataclass
    class Mine(FSDPTurboTrainingArguments):
        cp_size: int = 1

    pretend_world(monkeypatch, 4)
    accelerate_yaml({"cp_size": 2})
    assert Mine(output_dir=str(tmp_path), use_cpu=True, report_to="none").cp_size == 1


def test_a_default_is_never_put_down_to_python(build, accelerate_yaml):
    first = build()
    for args in (first, dataclasses.replace(first), FSDPTurboTrainingArguments(**json.loads(first.to_json_string()))):
        assert "Python" not in describe_sources(args)
    accelerate_yaml({"cp_size": 2, "mp_replicate_size": 2})  # reduced in one process
    assert "Python" not in describe_sources(dataclasses.replace(build()))


def test_a_default_inside_dist_config_overrides_the_yaml(build, accelerate_yaml, monkeypatch):
    accelerate_yaml({"ep_dispatcher": "fused"})
    assert build(dist_config={"ep_dispatcher": "eager"}).ep_dispatcher == "eager"
    monkeypatch.setenv("FSDPTURBO_EP_DISPATCHER", "eager")
    assert build().ep_dispatcher == "eager"


def test_kernel_config_is_taken_as_a_whole(build, accelerate_yaml):
    accelerate_yaml({"kernel_config": {**FLA, "chunk_size": 16}})
    assert build().kernel_params.chunk_size == 16
    assert build(kernel_config={"name": "auto"}).kernel_params == KernelParams(["auto"])


def test_a_bad_value_from_elsewhere_names_its_source(build, accelerate_yaml, monkeypatch):
    path = accelerate_yaml({"ep_size": True})
    raises_naming(build, "ep_size", "True", path)
    monkeypatch.delenv("FSDPTURBO_ACCELERATE_CONFIG")
    for text in ("two", "", "2.0", "True"):
        monkeypatch.setenv("FSDPTURBO_EP_SIZE", text)
        raises_naming(build, "FSDPTURBO_EP_SIZE", text)
    monkeypatch.setenv("FSDPTURBO_EP_SIZE", "0")
    raises_naming(build, "ep_size", "0", "environment")


def test_an_unknown_variable_with_our_prefix_is_an_error(build, monkeypatch):
    monkeypatch.setenv("FSDPTURBO_EP_SISE", "2")
    message = raises_naming(build, "FSDPTURBO_EP_SISE", "FSDPTURBO_EP_SIZE")
    assert message.startswith("Unknown params")


def test_use_cpu_of_the_yaml_is_honoured(build, accelerate_yaml):
    accelerate_yaml({"ep_size": 2})
    assert build(use_cpu=False).use_cpu is True


def test_mixed_precision_of_the_launcher_must_be_ours(build, accelerate_yaml, monkeypatch):
    path = accelerate_yaml({}, YAML_HEAD + "mixed_precision: bf16\n")
    path.write_text(YAML_HEAD + "mixed_precision: bf16\n")
    raises_naming(build, "mixed_precision=bf16", path, "bf16=False")
    assert build(bf16=True).bf16
    path.write_text(YAML_HEAD + "mixed_precision: 'no'\n")
    raises_naming(lambda: build(bf16=True), "mixed_precision=no", "bf16=True")
    path.write_text(YAML_HEAD)
    assert build(bf16=True).bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    raises_naming(build, "mixed_precision=bf16", "bf16=False")


# ---- timeouts, copies, later changes ----


def test_dist_timeout_sets_ddp_timeout(build):
    assert build(dist_timeout=60).ddp_timeout == 60
    assert build(ddp_timeout=60, dist_timeout=60).ddp_timeout == 60
    for explicit in (60, 1800):
        both = {"ddp_timeout": explicit, "dist_timeout": 90}
        raises_naming(lambda given=both: build(**given), f"ddp_timeout={explicit}", "dist_timeout=90")


def test_dist_timeout_left_out_takes_ddp_timeout(build, accelerate_yaml):
    """Its default was five hours: that long a call on one rank alone would have kept the others waiting."""
    assert build().ddp_timeout == 1800
    assert build(ddp_timeout=60).ddp_timeout == 60
    again = dataclasses.replace(build(ddp_timeout=60))
    assert (again.ddp_timeout, again.dist_timeout) == (60, None)
    accelerate_yaml({"dist_timeout": 77})
    assert build().ddp_timeout == 77
    raises_naming(lambda: build(ddp_timeout=60), "ddp_timeout=60", "dist_timeout=77")


def test_a_copy_may_change_dist_timeout(build):
    again = dataclasses.replace(build(dist_timeout=60), dist_timeout=600)
    assert again.dist_timeout == again.ddp_timeout == 600
    thawed = pickle.loads(pickle.dumps(again))
    assert dataclasses.replace(thawed, dist_timeout=60).ddp_timeout == 60
    raises_naming(lambda: dataclasses.replace(again, ddp_timeout=60), "ddp_timeout=60", "dist_timeout=600")


def test_every_value_is_written_in_plain_types(build):
    import yaml

    args = build()
    assert yaml.safe_load(yaml.safe_dump(args.to_dict()))["ddp_timeout"] == 1800
    assert args.to_sanitized_dict()["ddp_timeout"] == 1800


def test_copies_say_the_same(build, accelerate_yaml, monkeypatch):
    pretend_world(monkeypatch, 8)
    accelerate_yaml({"ep_size": 4, "kernel_config": {"name": "auto"}, "dist_timeout": 77})
    monkeypatch.setenv("FSDPTURBO_EP_DISPATCHER", "fused")
    args = build(dist_config={"param_storage_dtype": "bfloat16"})
    again = dataclasses.replace(args, learning_rate=1.0)
    rebuilt = FSDPTurboTrainingArguments(**json.loads(args.to_json_string()))
    for other in (again, rebuilt, copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert other.fsdpturbo_params == args.fsdpturbo_params
        assert other.kernel_params == args.kernel_params
        assert describe_sources(other) == describe_sources(args)
        assert other.dist_timeout == other.ddp_timeout == 77
    assert again.dist_config is not args.dist_config


def test_the_fields_hold_plain_json_types(build, monkeypatch):
    pretend_world(monkeypatch, 2)
    args = build(
        dist_config={"hook_modules": (), "ep_dispatcher": "fused"}, ep_size=2, kernel_config='{"name": "auto"}'
    )
    assert type(args.dist_config) is dict
    assert args.dist_config == FSDPTurboParams(ep_size=2, ep_dispatcher="fused").to_dict()
    assert json.loads(args.to_json_string())["dist_config"] == args.dist_config
    assert args.to_dict()["kernel_config"] == {"name": "auto"}
    assert (args.ep_size, args.ep_dispatcher) == (2, "fused")


def test_a_change_after_construction_is_not_ignored(build):
    for name, value in (("ep_size", 4), ("ep_dispatcher", "fused"), ("dist_config", {"ep_size": 4})):
        args = build()
        setattr(args, name, value)
        raises_naming(lambda args=args: args.fsdpturbo_params, name, value)


# ---- sizes ----


def test_one_process_reduces_sizes_of_yaml_and_environment_with_one_notice(
    build, accelerate_yaml, monkeypatch, caplog
):
    accelerate_yaml({"ep_size": 16, "mp_replicate_size": 2, "dist_config": {"efsdp_size": 2}})
    monkeypatch.setenv("FSDPTURBO_DP_SIZE", "16")
    with caplog.at_level(logging.WARNING, logger="hf_fsdpturbo"):
        args = build()
        dataclasses.replace(args)
    notices = [r.getMessage() for r in caplog.records if "One process" in r.getMessage()]
    assert len(notices) == 1
    for part in ("ep_size=16", "mp_replicate_size=2", "efsdp_size=2", "dp_size=16"):
        assert part in notices[0]
    alone = {
        "ep_size": 1,
        "efsdp_size": None,
        "dp_size": None,
        "cp_size": 1,
        "mp_replicate_size": 1,
        "mp_shard_size": None,
        "ranks_per_node": None,
    }
    assert sizes_for_world(args, 1) == alone
    assert (args.ep_size, args.fsdpturbo_params.efsdp_size, args.dp_size, args.mp_replicate_size) == (1, None, None, 1)
    assert sizes_for_world(args, 16) == {
        **alone,
        "ep_size": 16,
        "efsdp_size": 2,
        "dp_size": 16,
        "mp_replicate_size": 2,
    }


def test_one_process_keeps_sizes_given_in_python(build, accelerate_yaml):
    accelerate_yaml({"mp_replicate_size": 2})
    assert sizes_for_world(build(), 1)["mp_replicate_size"] == 1
    raises_naming(lambda: build(ep_size=2), "ep_size (2)", "dp_size (1)")


def test_sizes_that_do_not_fit_are_refused_before_anything_is_read(build, monkeypatch):
    pretend_world(monkeypatch, 8)
    assert build(ep_size=4).fsdpturbo_topology.expert_shape == (1, 2, 4, 1)
    raises_naming(lambda: build(ep_size=3), "ep_size (3)", "dp_size (8)", "divides world_size / cp_size")
    raises_naming(lambda: build(ep_size=4, dist_config={"efsdp_size": 3}), "efsdp_size (3)", "(2)")
    raises_naming(lambda: build(dp_size=4), "dp_size (4)", "world_size (8)")
    raises_naming(lambda: build(mp_replicate_size=3), "mp_replicate_size (3)", "world_size (8)")


def test_ranks_per_node_from_every_source(build, accelerate_yaml, monkeypatch):
    """The arguments leave the launcher's own number to the trainer, whose ranks can compare theirs."""
    accelerate_yaml({"ranks_per_node": 4})
    assert build().ranks_per_node is None  # one process
    pretend_world(monkeypatch, 8)
    assert (build().ranks_per_node, build(ep_size=8).fsdpturbo_topology.ep_nodes) == (4, 2)
    monkeypatch.setenv("FSDPTURBO_RANKS_PER_NODE", "2")
    assert build(ep_size=8).fsdpturbo_topology.ep_nodes == 4
    assert build(ep_size=8, ranks_per_node=8).fsdpturbo_topology.ep_nodes == 1
    raises_naming(lambda: build(ranks_per_node=3), "ranks_per_node (3)", "world_size (8)", "8 for one node")
    raises_naming(lambda: build(ranks_per_node=0), "ranks_per_node", "positive", "0")


def test_what_python_sets_in_vain_in_one_process_is_listed(build, accelerate_yaml, monkeypatch):
    accelerate_yaml({"ep_dispatcher": "fused", "dist_config": {"reshard_after_forward": False}})
    assert "without effect" not in describe_sources(build(dist_config={"param_storage_dtype": "float32"}))
    vain = {"offload_params": True, "pin_memory": False, "ep_backend": "fsdp_turbo", "hook_modules": ["model"],
            "fsdp_ignored_modules": ["lm_head"]}  # fmt: skip
    kwargs = {"dist_config": vain, "init_config": {"name": "init_on_rank0"}}
    (line,) = [row for row in describe_sources(build(**kwargs)).splitlines() if "without effect in one" in row]
    for name in ("offload_params=True", "ep_backend='fsdp_turbo'", "hook_modules=", "fsdp_ignored_modules=",
                 "init_on_rank0"):  # fmt: skip
        assert name in line
    assert "reshard_after_forward" not in line
    pretend_world(monkeypatch, 2)
    assert "without effect" not in describe_sources(build(**kwargs))


@pytest.mark.parametrize("accelerator", [True, False])
def test_the_dispatcher_of_nobodys_choice(build, monkeypatch, accelerator):
    """``auto`` on an accelerator; ``eager`` can still be asked for there, and the upstream library knows no auto."""
    monkeypatch.setattr(sources, "_has_accelerator", lambda: accelerator)
    assert build(use_cpu=True).ep_dispatcher == "eager"
    settings = {False: "eager", True: "auto"}
    given = dict.fromkeys(sources.PUBLIC_DEFAULTS)
    key = sources.DISPATCHER

    def resolved(**more):
        return sources.resolve_settings({**given, **more})[0][key]

    assert resolved() == sources.Setting(settings[accelerator], sources.DEFAULT)
    assert resolved(ep_dispatcher="eager").value == "eager"
    assert resolved(dist_config={"ep_backend": "fsdp_turbo"}) == sources.Setting("eager", sources.DEFAULT)
    assert resolved(dist_config={"ep_backend": "fsdp_turbo", "ep_dispatcher": "fused"}).value == "fused"


def test_processes_that_do_not_know_each_other_are_an_error(build, monkeypatch):
    monkeypatch.setattr(launch_config, "world_size", lambda: 2)
    raises_naming(build, "WORLD_SIZE=2", "world of 1", "use_cpu")


def test_one_process_with_many_gpus_uses_one(build, monkeypatch, caplog):
    monkeypatch.setattr(
        FSDPTurboTrainingArguments, "_setup_devices", property(lambda self: setattr(self, "_n_gpu", 4))
    )
    pretend_world(monkeypatch, 1)
    with caplog.at_level(logging.WARNING, logger="hf_fsdpturbo"):
        assert build()._n_gpu == 1
    assert "4 GPUs" in caplog.text


def test_bf16_storage_is_named_at_every_rate():
    for rate, text in ((2e-5, "2e-05"), (1e-3, "0.001")):
        assert text in bf16_storage_warning(rate)
        assert "param_storage_dtype='float32'" in bf16_storage_warning(rate)
