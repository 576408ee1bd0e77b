"""``hf-fsdpturbo plan``: against measured peaks, against the bytes of sharded tiny models, and what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import dispatch_bytes
from benchmarks.export_planning import MODELS
from benchmarks.simulated_ranks import fake_world
from benchmarks.train_throughput import model_config
from hf_fsdpturbo import cli, enable_fused_experts, shipped
from hf_fsdpturbo.arguments import unsupported
from hf_fsdpturbo.arguments.params import FSDPTurboParams
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.launch_config.accelerate_yaml import read_yaml
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.order import parallelize_model
from hf_fsdpturbo.plan.activations import kept_whole
from hf_fsdpturbo.plan.exchanged import even_at, rows_sent
from hf_fsdpturbo.plan.held import held, moment_bytes
from hf_fsdpturbo.plan.peak import gathered, highest, moments
from hf_fsdpturbo.plan.planned_run import PlannedRun
from hf_fsdpturbo.plan.printed import yaml_of
from hf_fsdpturbo.plan.released import released_names
from hf_fsdpturbo.plan.search import fits
from hf_fsdpturbo.plan.shape import check_fits, shape_of, shape_of_config
from hf_fsdpturbo.plan.storage import packed_bytes, storage_note
from hf_fsdpturbo.quantised.methods import PackedAs
from hf_fsdpturbo.topology import Topology
from tests.models_recipes.planned import devices_and_memory
from tests.models_recipes.planned import run_of as recipe_run
from tests.models_recipes.table import HEADROOM
from tests.support.tiny_models import tiny_config

# Peaks of benchmarks/README.md, Qwen3-30B-A3B's shape, sequence 4096, Liger's norms: GiB, layers, world, and the run.
# Two devices were measured with TRL's LM head.
MEASURED: dict[str, tuple[float, int, int, dict[str, Any]]] = {
    "bf16": (43.3, 8, 1, {"batch": 4}),
    "bf16, eager": (53.2, 8, 1, {"batch": 4, "dispatcher": "eager", "fused_head": False}),
    "float32": (92.8, 8, 1, {"batch": 2, "storage": "float32"}),
    "float32, eager": (84.3, 8, 1, {"batch": 2, "storage": "float32", "dispatcher": "eager", "fused_head": False}),
    "full": (80.5, 16, 1, {"batch": 4, "recompute": "full"}),
    "selective": (80.5, 16, 1, {"batch": 4, "recompute": "selective"}),
    "ep 2": (29.4, 8, 2, {"batch": 4, "fused_head": False}),
    "ep 2, eager": (39.8, 8, 2, {"batch": 4, "dispatcher": "eager", "fused_head": False}),
    "ep 2, full": (62.3, 24, 2, {"batch": 4, "recompute": "full", "fused_head": False}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_peaks(name: str):
    measured, layers, world, settings = MEASURED[name]
    config = model_config(SimpleNamespace(tiny=False, layers=layers))
    shape = shape_of_config(config, settings.get("storage", "bfloat16"))
    run = PlannedRun(Topology.resolve(world, ep_size=world), liger=True, **settings)
    assert highest(shape, run).gib() == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(("frozen", "weights", "measured"), [("full", 20.53, 26.54), ("nf4", 7.19, 13.58)])
def test_measured_peaks_of_adapters(frozen: str, weights: float, measured: float):
    """benchmarks/results/qlora_2026-12-01.jsonl: 16 layers, adapters on attention and experts; 5 and 8 % lacking."""
    shape = shape_of_config(model_config(SimpleNamespace(tiny=False, layers=16)), "bfloat16")
    run = PlannedRun(
        Topology.resolve(1), batch=2, recompute="full", lora_r=16, lora_targets="all", fused_head=True, frozen=frozen
    )
    assert held(shape, run).weights / 2**30 == pytest.approx(weights, abs=0.005)
    assert highest(shape, run).gib() == pytest.approx(measured, rel=0.085)


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {"ep_size": 2}),
    (4, {"ep_size": 2}),
    (4, {"ep_size": 2, "efsdp_size": 1}),
    (8, {"ep_size": 1}),
    (8, {"ep_size": 4, "cp_size": 2}),
    (8, {"ep_size": 8, "mp_replicate_size": 2}),
    (16, {"ep_size": 8}),
]


def bytes_of_a_rank(config: Any, storage: str, world: int, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Weights, gradients and moments of rank 0, as our own sharding and AdamW lay them out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, storage))
    own = {name: sizes[name] for name in ("ep_size", "efsdp_size") if name in sizes}
    params = FSDPTurboParams(ep_dispatcher="fused", **own)
    args: Any = SimpleNamespace(
        fsdpturbo_params=params, bf16=True, kernel_params=None, recompute="full", activation_checkpointing=False,
        per_device_train_batch_size=1, device=torch.device("cpu"),
    )  # fmt: skip
    with fake_world(0, world):
        state = FSDPTurboParallelState(Topology.resolve(world, **sizes), "cpu", None)
        parallelize_model(model, args, state, head_unit=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer.step()
        weights = list(model.parameters())
        gradients = [parameter.grad for parameter in weights]
        moments_ = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return tuple(sum(map(local_bytes, tensors)) for tensors in (weights, gradients, moments_))  # type: ignore


def local_bytes(tensor: Any) -> int:
    return getattr(tensor, "_local_tensor", tensor).nbytes


@pytest.mark.parametrize(
    ("kind", "storage"),
    [("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32"), ("gpt_oss", "float32"), ("deepseek_v3", "float32")],
)
def test_what_a_rank_holds_is_exact(kind: str, storage: str):
    """Vocabulary that no shard count divides; embedding, routers, norms and biases in units of their own dtypes."""
    config = tiny_config(kind, vocab_size=389)
    shape = shape_of_config(config, storage)
    for world, sizes in LAYOUTS:
        planned = held(shape, PlannedRun(Topology.resolve(world, **sizes), storage=storage))
        counted = bytes_of_a_rank(config, storage, world, sizes)
        assert (planned.weights, planned.gradients, planned.optimizer) == counted, (world, sizes)


WIDE = {"hidden_size": 256, "num_attention_heads": 8}
KEPT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 96},
    "mixtral": {"head_dim": 32, "intermediate_size": 96},
    "deepseek_v3": {  # values as wide as queries: else the CPU's sdpa keeps length x length numbers
        "moe_intermediate_size": 96, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16,
    },
}  # fmt: skip


def kept_by_autograd(config: Any, tokens: int, fused: bool) -> int:
    """Bytes of what a bf16 forward saves for its backward, parameters left out, in one process."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if fused:
        enable_fused_experts(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.randint(3, 300, (1, tokens))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    found = sum(storage.nbytes() for address, storage in kept.items() if address not in own)
    assert hidden.requires_grad
    return found


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_activations_are_what_autograd_keeps(kind: str, fused: bool):
    """One layer's: a model of three layers against one of two."""
    tokens, counted, planned = 512, [], []
    run = PlannedRun(Topology.resolve(1), dispatcher="fused" if fused else "eager")
    for layers in (2, 3):
        config = tiny_config(kind, layers=layers, **WIDE, **KEPT[kind])
        counted.append(kept_by_autograd(config, tokens, fused))
        shape = shape_of_config(config, "bfloat16")
        planned.append(tokens * sum(kept_whole(unit, shape, run) for unit in shape.layers))
    assert planned[1] - planned[0] == pytest.approx(counted[1] - counted[0], rel=0.03)


def test_copies_stand_beside_float32_experts_that_train_whole():
    shape = shape_of_config(tiny_config("qwen3_moe"), "float32")
    for sizes, copies in (({"ep_size": 2}, 2 * shape.expert_numel // 2), ({"ep_size": 1}, 0)):
        run = PlannedRun(Topology.resolve(2, **sizes), storage="float32")
        assert held(shape, run).copies == copies
    frozen = PlannedRun(Topology.resolve(2, ep_size=2), storage="float32", lora_r=8)
    assert held(shape, frozen).copies == 0
    layer = shape.layers[0]
    converted = layer.experts[0].numel // 2 * 2  # by FSDP, a layer at a time
    trained = PlannedRun(Topology.resolve(2, ep_size=2), storage="float32")
    assert gathered(layer, frozen) - gathered(layer, trained) == converted


@pytest.mark.parametrize(("ep_size", "near"), [(16, 8), (32, 8), (64, 8), (8, 8)])
def test_rows_and_break_even_are_those_that_are_counted(ep_size: int, near: int):
    config = MODELS["Qwen3-235B-A22B"][1]
    sizes = dispatch_bytes.sizes_of(config)
    index = dispatch_bytes.random_index(2048, sizes.top_k, sizes.experts, 0.0, ep_size)
    counted = dispatch_bytes.rows_away(index, sizes.experts, ep_size, near)
    topology = Topology.resolve(ep_size, ep_size=ep_size, ranks_per_node=near)
    for dispatcher, name in (("eager", "eager"), ("domino", "one stage"), ("fused", "two stages")):
        rows = rows_sent(sizes.experts, sizes.top_k, PlannedRun(topology, dispatcher=dispatcher))
        assert rows.between == pytest.approx(counted[name] / len(index), rel=0.03)
    everywhere = dispatch_bytes.rows_away(index, sizes.experts, ep_size, 1)["one stage"] / len(index)
    one = rows_sent(sizes.experts, sizes.top_k, PlannedRun(topology, dispatcher="domino"))
    assert one.inside + one.between == pytest.approx(everywhere, rel=0.03)
    shape = shape_of("qwen3-235b-a22b", "bfloat16")
    if ep_size == near:
        assert even_at(shape, PlannedRun(topology)) is None
    else:
        layout = PackedLayout(sizes.hidden, sizes.top_k, torch.bfloat16)
        layer = dispatch_bytes.step_bytes(counted, layout)["two stages"] / len(index)
        even = dispatch_bytes.break_even(sizes, layer, ep_size // near, near)
        assert even_at(shape, PlannedRun(topology)) == pytest.approx(even, rel=0.03)


BILLIONS = {
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "qwen3.5-35b-a3b": 34.7, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8, "deepseek-v3": 671.0, "glm-4.5-air": 106.9, "mixtral-8x7b": 46.7,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_shipped_names(name: str):
    assert released_names() == sorted(BILLIONS)
    shape = shape_of(name, "bfloat16")
    assert shape.numel / 1e9 == pytest.approx(BILLIONS[name], abs=0.06)
    run = PlannedRun(Topology.resolve(16, ep_size=8), task="dpo")
    assert all(size >= 0 for moment in moments(shape, run) for size in moment.kinds.values())
    check_recipes(name, shape)


def check_recipes(name: str, shape: Any) -> None:
    """Each ready recipe of the model fits as its own settings say, with the figure in its first line."""
    found = [recipe for recipe in shipped.model_recipes() if recipe.startswith(f"{name}/")]
    assert found
    is_plain = all(experts.is_plain for unit in shape.layers for experts in unit.experts)
    runs = [(recipe_run(recipe, is_plain), recipe) for recipe in found]
    for run, recipe in sorted(runs, key=lambda pair: pair[0].storage):
        devices, memory = devices_and_memory(recipe)
        shape = shape if shape.storage == run.storage else shape_of(name, run.storage)
        check_fits(shape, run)
        peak = highest(shape, run)
        assert fits(peak, HEADROOM * memory), recipe
        first = shipped.model_recipes()[recipe].read_text(encoding="utf-8").splitlines()[0]
        assert f"planned {peak.gib():.1f} GiB a rank" in first
        assert f"on {devices} devices of {memory} GiB" in first


def test_what_takes_memory_takes_more():
    """Settings against the plain run of 8 devices."""
    shape = shape_of("qwen3-30b-a3b", "bfloat16")

    def peak(**changed: Any) -> Any:
        sizes = {"ep_size": 8} | {key: changed.pop(key) for key in list(changed) if key.endswith("_size")}
        return highest(shape, PlannedRun(Topology.resolve(8, **sizes), **changed))

    plain = peak().total
    less = [{"recompute": "full"}, {"recompute": "selective"}, {"lora_r": 8}, {"liger": True}]
    less += [{"ep_size": 4, "cp_size": 2}, {"optimizer": "adamw_8bit"}, {"offload": True}]
    more = [{"batch": 2}, {"task": "dpo"}, {"mp_replicate_size": 8}, {"dispatcher": "eager"}, {"accumulation": 2}]
    assert {str(each): peak(**each).total < plain for each in less} == {str(each): True for each in less}
    assert {str(each): peak(**each).total > plain for each in more} == {str(each): True for each in more}
    assert peak(recompute="full").total < peak(recompute="selective").total
    assert peak(ep_size=4, efsdp_size=1).total > peak(ep_size=4, efsdp_size=2).total
    assert peak(task="dpo").kinds["reference"] == held(shape, PlannedRun(Topology.resolve(8, ep_size=8))).weights
    assert peak(task="dpo", lora_r=8).kinds["reference"] == 0


def test_blocks_of_bits_and_the_host():
    """torchao's blocks: an element's byte and a float32 scale each 256 of them; offloaded, nothing stays on a rank."""
    shape, sizes = shape_of("qwen3-30b-a3b", "bfloat16"), Topology.resolve(8, ep_size=8)
    plain, eight, four, host = (
        PlannedRun(sizes, optimizer=optimizer, offload=offload)
        for optimizer, offload in (("adamw", False), ("adamw_8bit", False), ("adamw_4bit", False), ("adamw", True))
    )
    elements = held(shape, plain).weights / 2
    assert held(shape, plain).optimizer == 4 * elements
    assert held(shape, eight).optimizer == pytest.approx(2 * elements * (1 + 4 / 256), rel=1e-3)
    assert held(shape, four).optimizer == pytest.approx(2 * elements * (1 / 2 + 4 / 128), rel=1e-3)
    assert moment_bytes(4095, 2, eight) == moment_bytes(4095, 2, plain)
    assert moment_bytes(256 * 17 + 1, 4, eight) == 8 * (256 * 17 + 1)
    found = highest(shape, host)
    on_host = ("weights", "optimizer", "expert copies", "reference")
    assert [found.kinds[kind] for kind in on_host] == [0] * 4
    assert gathered(shape.layers[0], host) > gathered(shape.layers[0], plain)  # its experts come too
    assert held(shape, host) == held(shape, plain)
    assert "8bit" in unsupported._UNPROVEN_OPTIMIZERS, "it is taken now: printed.py says that it is refused"


def test_frozen_weights_are_counted_as_a_rank_holds_them(capsys):
    """gpt-oss-20b: 24 layers of 32 experts with 3 x 2880 x 2880 weights: 2 bytes each in bf16, 17/32 as released."""
    shape, sizes = shape_of("gpt-oss-20b", "bfloat16"), Topology.resolve(8, ep_size=8)
    full, kept, nf4 = (PlannedRun(sizes, lora_r=8, frozen=way) for way in ("full", "mxfp4", "nf4"))
    experts = 24 * 32 // 8 * 3 * 2880**2
    assert held(shape, full).weights - held(shape, kept).weights == experts * 2 - experts * 17 // 32
    dense = held(shape, full).weights - held(shape, nf4).weights - (experts * 2 - experts * 9 // 16)
    attention = 24 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64)
    assert dense == pytest.approx(attention * (2 - 9 / 16) / 8, rel=1e-3)
    assert highest(shape, kept).total < highest(shape, full).total
    for wrong, said in (({}, "lora"), ({"lora_r": 8, "offload": True}, "frozen=nf4")):
        with pytest.raises(ValueError, match=said):
            PlannedRun(sizes, frozen="nf4", **wrong)
    with pytest.raises(SystemExit):
        cli.main(["plan", "qwen3-30b-a3b", "--devices", "8", "--lora_r", "8", "--frozen", "mxfp4"])
    (error,) = capsys.readouterr().err.splitlines()
    assert "frozen=mxfp4 is of a release in MXFP4" in error


def test_search_ranks_what_fits_and_prints_a_config_that_parses(tmp_path, capsys):
    assert cli.main(["plan", "qwen3-30b-a3b", "--devices", "16", "--memory", "40", "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found
    assert all(each["fits"] and each["peak_gib"] <= 38 for each in found)
    sent = [each["sent_gib"]["between"] for each in found if each["recompute"] == "full"]
    assert sent == sorted(sent)
    assert cli.main(["plan", "qwen3-30b-a3b", "--devices", "16", "--memory", "40", "--search"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "best.yaml"
    path.write_text(text[text.index("# qwen3-30b-a3b on 16 devices") :], encoding="utf-8")
    launch = read_yaml(path, "test", None)
    best = found[0]["layout"]
    assert launch.fields["ep_size"] == best["ep_size"]
    params = FSDPTurboParams(**launch.fields["dist_config"])
    assert (params.efsdp_size, params.param_storage_dtype) == (best["efsdp_size"], "bfloat16")
    assert cli.main(["plan", "deepseek-v3", "--devices", "8", "--search"]) == 1
    assert "no layout of 8 devices fits" in capsys.readouterr().out


def test_the_config_carries_what_was_planned(tmp_path):
    shape = shape_of_config(tiny_config("qwen3_moe"), "float32", "tiny")
    sizes = {"ep_size": 2, "efsdp_size": 1, "cp_size": 2, "mp_replicate_size": 2, "ranks_per_node": 8}
    run = PlannedRun(
        Topology.resolve(16, **sizes), storage="float32", recompute="selective", sequence=64, offload=True
    )
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml_of(shape, run), encoding="utf-8")
    fields = dict(read_yaml(path, "test", None).fields)
    params = FSDPTurboParams(**fields.pop("dist_config"))
    assert (params.param_storage_dtype, params.offload_params) == ("float32", True)
    assert fields == {
        "ep_size": 2, "cp_size": 2, "mp_replicate_size": 2, "ep_dispatcher": "fused", "recompute": "selective"
    }  # fmt: skip
    assert "--activation_checkpointing true" in path.read_text(encoding="utf-8")


WRONG = {
    "devices": (["qwen3-30b-a3b", "--devices", "0"], True),
    "memory": (["qwen3-30b-a3b", "--devices", "8", "--memory", "-1"], True),
    "ep_size": (["qwen3-30b-a3b", "--devices", "8", "--ep_size", "3"], True),
    "cp_size": (["qwen3-30b-a3b", "--devices", "8", "--cp_size", "3"], True),
    "ranks_per_node": (["qwen3-30b-a3b", "--devices", "8", "--ranks_per_node", "3"], True),
    "batch": (["qwen3-30b-a3b", "--devices", "8", "--batch", "0"], True),
    "sequence": (["qwen3-30b-a3b", "--devices", "8", "--sequence", "0"], True),
    "lora_r": (["qwen3-30b-a3b", "--devices", "8", "--lora_r", "-2"], True),
    "--storage": (["qwen3-30b-a3b", "--devices", "8", "--storage", "int4"], True),
    "--optimizer": (["qwen3-30b-a3b", "--devices", "8", "--optimizer", "lion"], True),
    "offload": (["qwen3-30b-a3b", "--devices", "1", "--offload"], True),
    "--devices": (["qwen3-30b-a3b"], True),
    "MODEL": (["no-such-model", "--devices", "8"], True),
    "MODEL 'a/b'": (["a/b", "--devices", "8"], True),
    "ep_size (16)": (["mixtral-8x7b", "--devices", "16", "--ep_size", "16"], False),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_error_that_names_its_argument(name: str, capsys, monkeypatch):
    """What can be seen without the model is refused before anything is built."""
    arguments, before = WRONG[name]
    if before:
        monkeypatch.setattr("hf_fsdpturbo.plan.shape.shape_of", None)
    with pytest.raises(SystemExit) as error:
        cli.main(["plan", *arguments])
    assert error.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert name in lines[0]


def test_a_config_file_that_is_none(tmp_path, capsys):
    path = tmp_path / "config.json"
    for text in ("{", "[]", '{"model_type": "no_such"}', '{"hidden_size": 3}', '{"model_type": "t5"}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as error:
            cli.main(["plan", str(path), "--devices", "2"])
        assert error.value.code == 2
        assert "error: MODEL" in capsys.readouterr().err


def test_a_folder_of_a_quantised_release_says_what_it_becomes(tmp_path, capsys):
    config = tiny_config("gpt_oss").to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for model in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["plan", str(model), "--devices", "2", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["layout"]["ep_size"] == 2
        (said,) = (note for note in found["notes"] if "quantised (mxfp4)" in note)
        assert "while they load" in said
        assert any("counted as flash" in note for note in found["notes"])


def test_bytes_of_packed_releases():
    """MXFP4: half a byte, and a byte of scale for 32; FP8: a byte, and four for a block, or for all."""
    assert packed_bytes(PackedAs("mxfp4")) == 17 / 32
    assert packed_bytes(PackedAs("fp8", (128, 128))) == 1 + 4 / 128**2
    assert packed_bytes(PackedAs("fp8")) == 1
    fields = {"quantization_config": {"quant_method": "fp8"}}
    assert "1.0 GiB of packed weights become 2.0 GiB" in str(storage_note(fields, [2**29], [2**29], 2))
    fields = {"quantization_config": {"quant_method": "mxfp4"}}
    assert "0.3 GiB of packed" in str(storage_note(fields, [2**29], [2**29], 2))
    assert storage_note({}, [1], [1], 2) is None
    assert "gptq" in str(storage_note({"quantization_config": {"quant_method": "gptq"}}, [1], [1], 2))
