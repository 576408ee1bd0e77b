"""``hf-fsdpturbo verify`` without ranks: layouts, small models, rows for wrong numbers, processes, words."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fsdpturbo.commands import verify_door
from hf_fsdpturbo.commands.recipe_words import given_values
from hf_fsdpturbo.ranks import rank as rank_of
from hf_fsdpturbo.verify import faults, runs, verdicts
from hf_fsdpturbo.verify.few_ranks import Layout, another, on_few_ranks, on_two_ranks, read_layout, users_layout
from hf_fsdpturbo.verify.processes import ProcessFailed, launch
from hf_fsdpturbo.verify.recording import Record
from hf_fsdpturbo.verify.small_model import few_experts, few_heads, save_small, small_config
from hf_fsdpturbo.verify.to_prove import Asked, carried
from hf_fsdpturbo.verify.users_config import read_config, read_values
from hf_fsdpturbo.verify.verdicts import DIFFERS, EXACT, Verdict
from tests.support.fresh_work import summed

CLIP = 0.25

# Layouts


@pytest.mark.parametrize("name", ["ep2", "ep2_efsdp2", "efsdp2", "edp2", "cp2", "ep2_cp2", "ep4_hsdp2"])
def test_a_layouts_name_is_what_is_read(name: str):
    layout = read_layout(name)
    assert layout.name == name
    other = another(layout)
    assert other != layout
    assert other.dp == layout.dp, "it would see other micro-batches"


@pytest.mark.parametrize("text", ["", "ep", "ep0", "ep2_ep2", "tp2", "ep2-efsdp2", "ep32", "ep2_hsdp3", "EP2"])
def test_no_layout_is_refused(text: str):
    with pytest.raises(ValueError, match="layout|ranks|mp_replicate_size"):
        read_layout(text)


def test_the_users_layout_and_what_few_ranks_show_of_it():
    users = users_layout(16, {"ep_size": 4, "efsdp_size": 2, "cp_size": 2, "mp_replicate_size": None})
    assert users == Layout(ep=4, efsdp=2, edp=1, cp=2)
    assert on_few_ranks(users) == users
    assert on_two_ranks(users) == Layout(ep=2)
    assert on_two_ranks(Layout(cp=8)) == Layout(cp=2)
    assert on_two_ranks(Layout()) == Layout(ep=2)
    assert on_few_ranks(Layout(ep=64, efsdp=2)) == Layout(ep=8, efsdp=2)
    assert on_few_ranks(Layout(ep=8, efsdp=4, hsdp=4)).check().world == 16
    assert users_layout(None, {"ep_size": 8}).world == 8
    with pytest.raises(ValueError, match=r"ep_size \(3\) must divide dp_size \(8\)"):
        users_layout(8, {"ep_size": 3})


# The small model


@pytest.mark.parametrize(
    ("fields", "ep_size", "experts"),
    [
        ({"num_experts_per_tok": 8}, 2, 10),
        ({"num_experts_per_tok": 8}, 16, 32),
        ({"num_experts_per_tok": 1}, 2, 4),
        ({"num_experts_per_tok": 2}, 3, 6),
        ({"moe_k": 6}, 2, 8),
        ({"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, 2, 24),
        ({"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}, 8, 16),
    ],
)
def test_experts_are_few_above_top_k_and_fit_their_groups(fields: dict[str, Any], ep_size: int, experts: int):
    assert few_experts(SimpleNamespace(**fields), ep_size) == experts


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp_size", "expected"),
    [(32, 4, 1, (4, 2)), (128, 128, 1, (2, 2)), (128, 128, 4, (4, 4)), (16, 2, 8, (8, 2)), (16, 1, 1, (2, 1))],
)
def test_heads_are_few_and_enough_for_cp(heads: int, kv_heads: int, cp_size: int, expected: tuple[int, int]):
    assert few_heads(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads), cp_size) == expected


@pytest.mark.parametrize(
    ("name", "kinds", "kept"),
    [
        ("qwen3.5-35b-a3b", "2 of 2", {"head_dim": 256, "linear_key_head_dim": 128, "num_experts_per_tok": 8}),
        ("gpt-oss-20b", "2 of 2", {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 16}),
        ("deepseek-v3", "2 of 2", {"qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1}),
    ],
)
def test_every_kind_of_layer_and_the_sizes_of_heads_stay(name: str, kinds: str, kept: dict[str, int], tmp_path):
    whole = read_config(read_values(name), name)
    config = small_config(whole, 2, 1)
    assert {field: getattr(config, field) for field in kept} == kept
    assert config.num_hidden_layers == 2
    small = save_small(config, whole, tmp_path)
    assert small.kinds == f"{kinds} kinds of layers"
    assert small.experts == few_experts(whole, 2)


def test_layers_that_a_list_of_numbers_makes_dense_are_a_kind(tmp_path):
    values = {**read_values("qwen3-30b-a3b"), "mlp_only_layers": [0, 1]}
    whole = read_config(values, "mine")
    config = small_config(whole, 2, 1)
    assert config.mlp_only_layers == [0]
    assert save_small(config, whole, tmp_path).kinds == "2 of 2 kinds of layers"


# Rows


def record(**changes: Any) -> Record:
    draw = torch.Generator().manual_seed(0)
    names = ("experts.gate_up_proj", "q_proj.weight")
    gradients = [{name: torch.randn(4, 3, 2, generator=draw) for name in names} for _ in range(2)]
    norms = [float(torch.stack([g.norm() for g in step.values()]).norm()) for step in gradients]
    for step, norm in zip(gradients, norms, strict=True):
        for tensor in step.values():
            tensor.mul_(CLIP / (norm + 1e-6))
    weights = {name: torch.randn(4, 3, 2, generator=draw) for name in names}
    made = Record(
        losses=[5.9, 5.8], grad_norms=norms, gradients=gradients, weights=weights, start_weights=dict(weights),
        extra={"loss of the end": 5.7},
    )  # fmt: skip
    return replace(made, **changes)


def rows_of(ours: Record) -> dict[str, Verdict]:
    plain = record()
    rows = [verdicts.loaded(ours, plain), *verdicts.trained(ours, plain, record(), CLIP)]
    rows.append(verdicts.saved_file(ours, plain, record()))
    rows.append(verdicts.together("resume", verdicts.resumed(ours, plain, record(), 1)))
    return {row.row: row for row in rows}


def red(ours: Record) -> set[str]:
    return {name for name, row in rows_of(ours).items() if row.verdict != EXACT}


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * (2 if "experts" in name else 1) for name, tensor in tensors.items()}


def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[[1, 0, 2, 3]] if "experts" in name else tensor for name, tensor in tensors.items()}


def test_equal_numbers_are_exact():
    rows = rows_of(record())
    assert {row.verdict for row in rows.values()} == {EXACT}
    assert verdicts.verdict_of(rows.values()) == 0
    assert verdicts.table(list(rows.values()))[-1] == "exact"


WRONG = {
    "a gradient twice": (lambda r: replace(r, gradients=[doubled(step) for step in r.gradients]), {"gradients"}),
    "a step's gradient": (lambda r: replace(r, gradients=[r.gradients[0], swapped(r.gradients[1])]), {"gradients"}),
    "no gradients": (lambda r: replace(r, gradients=[{}, {}]), {"gradients"}),
    "loaded experts": (lambda r: replace(r, start_weights=swapped(r.start_weights)), {"loaded"}),
    "a loss": (lambda r: replace(r, losses=[5.9, 5.9]), {"loss", "resume"}),
    "a loss that is no number": (lambda r: replace(r, losses=[5.9, float("nan")]), {"loss", "resume"}),
    "a step too few": (lambda r: replace(r, losses=[5.9]), {"loss", "resume"}),
    "weights": (lambda r: replace(r, weights=swapped(r.weights)), {"weights", "saved file", "resume"}),
    "the loss of what was saved": (lambda r: replace(r, extra={"loss of the end": 5.8}), {"saved file"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_number_is_red_in_its_row(what: str):
    wrong, expected = WRONG[what]
    assert red(wrong(record())) == expected
    ours = rows_of(wrong(record()))
    assert verdicts.verdict_of(ours.values()) == 1
    assert "differs: " in verdicts.table(list(ours.values()))[-1]


def test_a_wrong_norm_is_the_norms_row_though_it_clips_otherwise():
    right = record()
    clipped = [{n: t / 2**0.5 for n, t in step.items()} for step in right.gradients]
    wrong = replace(right, grad_norms=[norm * 2**0.5 for norm in right.grad_norms], gradients=clipped)
    assert red(wrong) == {"norm"}


def test_the_worst_tensor_is_named():
    row = rows_of(replace(record(), gradients=[doubled(step) for step in record().gradients]))["gradients"]
    assert (row.verdict, row.found) == (DIFFERS, pytest.approx(1.0))
    assert row.detail == "2 of 4 gradients; worst: gradient 1 experts.gate_up_proj"


def test_near_is_told_from_far_in_bf16():
    assert verdicts.bf16(record(losses=[5.901]), record(losses=[5.9])).verdict == EXACT
    assert verdicts.bf16(record(losses=[5.91]), record(losses=[5.9])).verdict == DIFFERS


def test_other_micro_batches_are_seen():
    one, other = ({"input_ids": torch.tensor([[3, 4]])}, {"input_ids": torch.tensor([[3, 5]])})
    assert verdicts.same_batches(Record(batches=[one]), Record(batches=[one, other]))
    assert not verdicts.same_batches(Record(batches=[other]), Record(batches=[one, other]))
    assert not verdicts.same_batches(Record(), Record(batches=[one]))


def test_packed_documents_come_apart():
    packed = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]),
        "labels": torch.tensor([[-100, 6, 7, -100, 9], [-100, 6, 7, -100, -100]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]),
    }
    rows = runs.unpacked(packed)
    assert rows["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0], [5, 6, 7], [0, 0, 0]]
    assert rows["labels"].tolist() == [[-100, 6, 7], [-100, 9, -100], [-100, 6, 7], [-100] * 3]
    assert rows["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]], "routers see the padding"


# Faults


def test_every_fault_belongs_to_a_row_and_a_run():
    asked = Asked("m", {}, Layout(), Layout(ep=2))
    known = {*rows_of(record()), "recompute", "packing", "resume"}
    for name, fault in faults.FAULTS.items():
        assert fault.row in known, name
        assert fault.run in runs.runs(asked), name


@pytest.mark.parametrize("names", [("a.experts.0.w", "a.experts.1.w"), ("a.experts.gate_up_proj",)])
def test_the_fault_in_a_file_exchanges_two_experts(names: tuple[str, ...], tmp_path):
    from safetensors.torch import load_file, save_file

    before = {name: torch.full((2, 3, 4), float(i)) + torch.arange(2.0)[:, None, None] for i, name in enumerate(names)}
    save_file({**before, "z": torch.ones(1)}, tmp_path / "model.safetensors")
    faults.exchange_in_file(str(tmp_path))
    after = load_file(tmp_path / "model.safetensors")
    other = list(reversed(names)) if len(names) == 2 else list(names)
    for name, source in zip(names, other, strict=True):
        assert torch.equal(after[name], before[source].flip(0) if len(names) == 1 else before[source])
    save_file({"z": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="finds no two experts"):
        faults.exchange_in_file(str(tmp_path))


# Processes


FORKED: dict[str, Any] = {"devices": 0, "alone": True, "fresh": False}


def test_processes_answer_in_order(tmp_path):
    works = [functools.partial(lambda number: (number, rank_of()), number) for number in range(3)]
    assert launch(works, tmp_path / "a", 30, **FORKED) == [(0, 0), (1, 0), (2, 0)]


def test_ranks_that_are_new_interpreters(tmp_path, monkeypatch):
    """As ranks on accelerators are."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    works = [functools.partial(summed, number) for number in (3, 4)]
    found = launch(works, tmp_path / "ranks", 60, devices=0, alone=False, fresh=True)
    assert found == [(7.0, 0, True), (7.0, 1, True)]


def test_what_is_sent_to_new_interpreters_can_be_sent(tmp_path):
    """Closures would do for forks only: every run's work goes by pickle."""
    import pickle

    from hf_fsdpturbo.verify import proof
    from hf_fsdpturbo.verify.small_model import SmallModel

    asked = Asked("m", {}, Layout(), Layout(ep=2), folder=tmp_path, fresh=True)
    whole_proof = proof.Proof(asked, 0, print)
    whole_proof.small = SmallModel("f", "c", "s", "k", 4, True)
    sent = []
    whole_proof._launch = lambda works, alone: sent.extend(works) or [Record()] * len(works)
    whole_proof.tell = lambda line: None
    for name in whole_proof.runs:
        whole_proof._ranks(name, asked.layout)
        whole_proof._alone([whole_proof._reference(whole_proof.runs[name], [{"a": torch.ones(1)}], moved=True)], name)
    assert len(sent) == 3 * len(whole_proof.runs)
    assert [pickle.loads(pickle.dumps(work)).func for work in sent] == [work.func for work in sent]


def test_a_process_that_fails_dies_or_sleeps_is_named(tmp_path):
    def well() -> None:
        pass

    def fail() -> None:
        raise ValueError("the words of rank 1")

    def die() -> None:
        os._exit(3)

    with pytest.raises(ProcessFailed, match="^rank 1: ValueError: the words of rank 1$") as failure:
        launch([well, fail], tmp_path / "fail", 30, **FORKED)
    assert "Traceback" in failure.value.log
    with pytest.raises(ProcessFailed, match=r"rank 1 died \(exit status 3\)"):
        launch([well, die], tmp_path / "die", 30, **FORKED)
    started = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"ranks \[0\] had not ended") as late:
        launch([lambda: time.sleep(60)], tmp_path / "late", 1, **FORKED)
    assert time.monotonic() - started < 10
    assert "in <lambda>" in late.value.log, "the stack of the one that waited"


# Words and files


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        verify_door.main(words)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


BAD = {
    "MODEL is missing": [],
    "'nothing' is no shipped name": ["nothing"],
    "argument --layout: 'ep' is no layout": ["gpt-oss-20b", "--layout", "ep"],
    "argument --layout: ep32 is 32 ranks": ["gpt-oss-20b", "--layout", "ep32"],
    "ep_size (3) must divide num_local_experts (32)": ["gpt-oss-20b", "--layout", "ep3"],
    "argument --inject: invalid choice: 'rain'": ["gpt-oss-20b", "--inject", "rain"],
    "--layout and --full": ["gpt-oss-20b", "--layout", "ep2", "--full"],
    "--full: nothing says": ["gpt-oss-20b", "--full"],
    "'nowhere' is neither a file nor a shipped name": ["gpt-oss-20b", "--accelerate_config", "nowhere"],
    "--config: there is no file or shipped recipe 'nowhere.yaml'": ["--config", "nowhere.yaml"],
    "cp_size (2) must divide world_size (3)": [
        "gpt-oss-20b", "--accelerate_config", "npu_cp2_ep4_efsdp2", "--nproc", "3",
    ],
    "argument --command: invalid choice: 'kto'": ["gpt-oss-20b", "--command", "kto"],
    "load_in_4bit: verify proves no quantised base": ["gpt-oss-20b", "--load_in_4bit", "true"],
    "--beta in the command line: no such argument": ["gpt-oss-20b", "--beta", "0.2"],
    "argument --device: invalid choice": ["gpt-oss-20b", "--device", "tpu"],
    "'more': one MODEL is enough": ["gpt-oss-20b", "more"],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_wrong_words_are_one_line_and_exit_status_2(message: str, capsys: pytest.CaptureFixture[str]):
    assert message in refused(BAD[message], capsys)


def test_a_dense_model_and_a_damaged_config_are_refused(tmp_path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "dense.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "other.json").write_text('{"hidden_size": 4}')
    assert "has no MoE layers" in refused([str(tmp_path / "dense.json")], capsys)
    assert "holds no model_type" in refused([str(tmp_path / "other.json")], capsys)
    assert f"--keep: {tmp_path} exists" in refused(["gpt-oss-20b", "--keep", str(tmp_path)], capsys)


def test_the_users_files_and_words_are_carried(tmp_path):
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "model_name_or_path: qwen3-30b-a3b\nweight_decay: 0.5\nrecompute: selective\nuse_peft: true\nlora_r: 4\n"
        "bf16: false\nlearning_rate: 3.0e-4\n"
    )
    words = ["--config", str(recipe), "--accelerate_config", "npu_cp2_ep4_efsdp2", "--weight_decay", "0.25"]
    options, rest = verify_door.parse([*words, "--layout", "ep2_cp2"])
    asked = verify_door._asked(options, rest)
    assert asked.users == Layout(ep=4, efsdp=2, cp=2)
    assert asked.layout == Layout(ep=2, cp=2)
    assert asked.training == {"weight_decay": 0.25, "gradient_accumulation_steps": 2}, "not the learning rate"
    assert asked.dist == {"ep_dispatcher": "fused"}
    assert asked.turbo["kernel_config"]["chunk_size"] == 64
    assert (asked.recompute, asked.bf16, asked.storage) == ("selective", False, "bfloat16")
    assert asked.lora == {"use_peft": True, "lora_r": 4}


def test_pictures_are_said_not_to_be_proven(tmp_path):
    for values, expected in (({}, 0), ({"vision_config": {}}, 1)):
        (tmp_path / "m.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", **values}))
        asked = verify_door._asked(*verify_door.parse([str(tmp_path / "m.json")]))
        assert sum("pictures are not proven" in note for note in asked.notes) == expected


def test_unknown_arguments_are_refused_by_the_recipes_parser():
    with pytest.raises(ValueError, match="--ep_siz in the command line: no such argument"):
        given_values("sft", ["--ep_siz", "2"], {})


def test_what_only_an_accelerator_has_is_replaced_with_a_note():
    given = {"ep_dispatcher": "mc2", "attn_implementation": "flash_attention_2", "kernel_config": {"name": "liger"}}
    fields, notes = carried(given, cpu=True)
    assert (fields["dist"], fields["attention"], fields["turbo"]) == ({"ep_dispatcher": "fused"}, "sdpa", {})
    assert len(notes) == 3
    fields, notes = carried(given, cpu=False)
    assert (fields["dist"], fields["attention"], notes) == ({"ep_dispatcher": "mc2"}, "flash_attention_2", ())


def test_arguments_of_preferences_are_carried_and_what_cannot_be_is_said():
    given = {"beta": 0.3, "loss_type": ["ipo"], "packing_strategy": "bfd", "precompute_ref_log_probs": True}
    fields, notes = carried(given, cpu=True, command="dpo")
    assert fields["training"] == {"beta": 0.3, "loss_type": ["ipo"], "gradient_accumulation_steps": 2}
    assert notes == ("precompute_ref_log_probs is not carried",)
    with pytest.raises(ValueError, match="load_in_8bit: verify proves no quantised base"):
        carried({"load_in_8bit": True}, cpu=True)


def test_preferences_have_no_packed_run_to_break():
    small = SimpleNamespace(has_aux_loss=False, architecture="A")
    for command in ("dpo", "reward"):
        known = runs.runs(Asked("m", {}, Layout(), Layout(ep=2), command=command))
        assert set(known) == {"train", "recompute", "resume", "bf16"}
        with pytest.raises(ValueError, match="documents_leak: there is no packing run"):
            faults.check_fault("documents_leak", small, {}, known)


def test_the_small_tokenizer_reads_preferences_as_the_ids_that_were_drawn():
    from hf_fsdpturbo.verify import made_data
    from hf_fsdpturbo.verify.small_model import small_tokenizer

    rows, tokenizer = made_data.columns("dpo", 3), small_tokenizer()
    for prompt, ids in zip(rows["prompt"], made_data.samples(3, seed=5, longest=made_data.PROMPT), strict=True):
        assert tokenizer(prompt + "w7<eos>")["input_ids"] == [*ids, 7, tokenizer.eos_token_id]
    assert rows["chosen"] != rows["rejected"]


def test_a_family_without_a_reward_model_is_refused():
    from hf_fsdpturbo.verify.users_config import architecture

    whole = read_config(read_values("gpt-oss-20b"), "m")
    assert (architecture(whole), architecture(whole, "reward")) == (
        "GptOssForCausalLM",
        "GptOssForSequenceClassification",
    )
    with pytest.raises(ValueError, match="has no reward model"):
        architecture(read_config(read_values("glm-4.5-air"), "m"), "reward")


def test_accelerators_are_asked_in_a_process_of_their_own(monkeypatch):
    from hf_fsdpturbo.verify import processes, proof

    def began(device: str, found: tuple[int, str], ranks: int) -> Any:
        monkeypatch.setattr(proof, "device_count", lambda: found)
        asked = Asked("m", {}, Layout(), Layout(ep=ranks), device=device)
        return proof.begin(asked, print)[0].devices

    assert [began("auto", (2, ""), n) for n in (2, 4)] == [2, 0], "as many as ranks, or CPU"
    assert began("accelerator", (1, ""), 2) == 1
    assert began("cpu", (8, ""), 2) == 0
    with pytest.raises(ValueError, match=r"--device accelerator: this machine has none that works \(driver too old\)"):
        began("accelerator", (0, "driver too old"), 2)
    assert processes.device_count()[0] == 0
    monkeypatch.setattr(processes.torch.accelerator, "current_accelerator", lambda: "cuda")
    monkeypatch.setattr(processes, "_ASK", "print('devices:', 3)")
    assert processes.device_count() == (3, "")
    monkeypatch.setattr(processes, "_ASK", "raise RuntimeError('no driver')")
    assert processes.device_count() == (0, "RuntimeError: no driver")
