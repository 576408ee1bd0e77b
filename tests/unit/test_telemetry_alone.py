"""What telemetry does without a run: time, FLOPs, entropy, the record, its picture, the report command, bad files."""

from __future__ import annotations

import math
import os
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_fsdpturbo import cli
from hf_fsdpturbo.dispatch import traffic as traffic_module
from hf_fsdpturbo.dispatch.traffic import Traffic
from hf_fsdpturbo.telemetry import load_picture, load_record
from hf_fsdpturbo.telemetry.clock import Clock
from hf_fsdpturbo.telemetry.expert_counts import counted_modules
from hf_fsdpturbo.telemetry.flops import model_flops, peak_of
from hf_fsdpturbo.telemetry.load_picture import PICTURE, draw_load, relative_load
from hf_fsdpturbo.telemetry.load_record import FILE, LoadRecord, read_load, summary
from hf_fsdpturbo.telemetry.metrics import _expert_metrics
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from hf_fsdpturbo.telemetry.router_entropy import entropy
from tests.support.tiny_models import FFN, HEAD_DIM, HIDDEN, VOCAB_SIZE, tiny_model

LAYERS = {"model.layers.0.mlp.experts": 4, "model.layers.2.mlp.experts": 3}


def record_of(windows: int, every: int = 5) -> LoadRecord:
    record = LoadRecord(dict(LAYERS))
    for number in range(windows):
        counts = np.array([[number, 5, 5, 5], [0, 8, 8, 0]])
        record.add(every * (number + 1), counts, 6.0 / (number + 1), 1000.0)
    return record


def test_clock_leaves_out_evaluation_and_counts_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()

    def slow():
        for batch in range(2):
            now[0] += 3.0
            yield batch

    clock.mark()
    now[0] += 50  # an evaluation before the first step, and data that a resumed run skips
    clock.was_away()
    assert list(clock.batches(slow())) == [0, 1]
    now[0] += 4
    clock.mark()
    now[0] += 100  # an evaluation
    clock.was_away()
    now[0] += 1
    assert clock.window() == (11.0, 6.0)
    now[0] += 2
    assert clock.window() == (2.0, 0.0)


def test_flops_are_those_of_the_matrices():
    """Worked out from the config; the embedding is looked up, not multiplied."""
    model = tiny_model("qwen3_moe", num_experts=8, top_k=2, layers=2)
    flops = model_flops(model, counted_modules(model))
    attention = HIDDEN * HEAD_DIM * (2 * 4 + 2 * 2)
    assert flops.token == 6 * (2 * (attention + HIDDEN * 8) + VOCAB_SIZE * HIDDEN)
    assert flops.pair == (6 * 3 * HIDDEN * FFN,) * 2
    assert (flops.key, flops.near_key, flops.window) == (6 * 4 * 2 * HEAD_DIM * 2, 0, None)
    assert flops.of(10, [20, 20], 55, 0) == 10 * flops.token + 40 * flops.pair[0] + 55 * flops.key
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    assert model_flops(model, counted_modules(model)).pair == (4 * 3 * HIDDEN * FFN,) * 2
    sliding = model_flops(tiny_model("gpt_oss"), {})
    assert (sliding.window, sliding.near_key, sliding.key) == (16, sliding.key, 6 * 4 * 2 * HEAD_DIM)
    by_layer = SimpleNamespace(num_attention_heads=[4, 4])  # some families name heads so
    model.config = SimpleNamespace(get_text_config=lambda: by_layer)
    assert model_flops(model, counted_modules(model)) is None
    tied = tiny_model("qwen3_moe", tie=True)
    assert model_flops(tied, counted_modules(tied)).token == flops.token


def test_peaks_are_found_by_whole_words(monkeypatch):
    names = {"NVIDIA H200": 790e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
    for name in [*names, "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "Ascend910_93"]:
        module = SimpleNamespace(get_device_name=lambda device, name=name: name)
        monkeypatch.setattr(torch, "get_device_module", lambda kind, module=module: module)
        found = peak_of(torch.device("cuda", 0))
        assert (found and found[0], found and found[2]) == (names.get(name), name if name in names else None)
    assert peak_of(torch.device("cpu")) is None


def test_keys_of_packed_rows_and_windows():
    model, tokens = tiny_model("gpt_oss").train(), RealTokens(torch.device("cpu"), window=3)
    tokens.attach(model)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    model(input_ids=torch.full((1, 7), 5), position_ids=positions, use_cache=False)
    assert tokens.totals.tolist() == [7, 15 + 3, 1 + 2 + 3 + 3 + 3 + 3]


def test_entropy():
    even = torch.zeros(2, 8)
    assert entropy(even).tolist() == pytest.approx([math.log(8)] * 2)
    assert entropy(even, is_sigmoid=True).tolist() == pytest.approx([math.log(8)] * 2)
    sure = torch.full((1, 8), -200.0)
    sure[0, 3] = 0.0
    assert entropy(sure).item() == entropy(sure, is_sigmoid=True).item() == 0.0


def test_expert_metrics():
    found = _expert_metrics({"a": np.array([4, 0, 0, 0]), "b": np.array([2, 2, 1, 1]), "c": np.zeros(4, dtype=int)})
    assert found["experts/load_max_over_mean"] == 4.0
    assert found["experts/load_max_over_mean_average"] == pytest.approx((4 + 2 / 1.5) / 2)
    assert found["experts/unused"] == 3 + 4
    assert _expert_metrics({}) == {}


def test_traffic_is_off_until_asked():
    traffic = Traffic()
    with traffic.waiting(torch.device("cpu")):
        time.sleep(0.01)
    assert traffic.seconds == 0
    traffic.is_on = True
    with traffic.waiting(torch.device("cpu")):
        time.sleep(0.01)
    assert traffic.seconds >= 0.01


def test_traffic_counts_what_leaves_the_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    traffic = Traffic()
    rows = torch.zeros(6, 4, dtype=torch.bfloat16)
    traffic.sent(rows, [1, 2, 3], None)
    assert traffic.bytes == 0
    traffic.is_on = True
    traffic.sent(rows, [1, 2, 3], None)
    traffic.sent(rows[:0], [0, 0, 0], None)
    assert traffic.bytes == 4 * 4 * 2


def test_events_are_read_once_they_have_passed(monkeypatch):
    made = []

    class Event:
        def __init__(self) -> None:
            self.passed = False
            made.append(self)

        def record(self) -> None:
            self.passed = False

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, other: object) -> float:
            return 5.0

    monkeypatch.setattr(traffic_module, "_event", lambda device: Event())
    traffic = Traffic()
    traffic.is_on = True
    for _ in range(2):
        with traffic.waiting(torch.device("cuda", 0)):
            pass
    traffic.collect()
    assert traffic.seconds == 0
    made[1].passed = True
    traffic.collect()
    assert traffic.seconds == 0.005
    with traffic.waiting(torch.device("cuda", 0)):
        pass
    assert len(made) == 4  # those that were read are used again


def test_record_comes_back_and_continues(tmp_path):
    record = record_of(4)
    record.write(str(tmp_path))
    found = read_load(str(tmp_path))
    assert os.listdir(tmp_path) == [FILE]
    assert (found.layers, found.steps, found.losses, found.rates) == (
        record.layers,
        record.steps,
        record.losses,
        record.rates,
    )
    assert np.array_equal(found.counts, record.counts)
    found.forget_after(12)  # the checkpoint that is resumed
    assert (found.steps, len(found.counts), len(found.losses), len(found.rates)) == ([5, 10], 2, 2, 2)


def test_a_long_record_stays_bounded(monkeypatch):
    monkeypatch.setattr(load_record, "MOST_WINDOWS", 6)
    record = record_of(7, every=1)
    assert record.steps == [2, 4, 6, 7]
    assert [int(counts[0, 0]) for counts in record.counts] == [0 + 1, 2 + 3, 4 + 5, 6]
    assert record.losses[0] == pytest.approx((6.0 + 3.0) / 2)


def test_relative_load():
    load = relative_load(np.array([[4, 0, 0, 0], [3, 3, 3, 0]]), np.array([4, 3]))
    assert load[0].tolist() == [4, 0, 0, 0]
    assert load[1, :3].tolist() == [1, 1, 1]
    assert math.isnan(load[1, 3])  # the layer has three experts


@pytest.mark.parametrize("windows", [1, 30])
def test_report_draws_a_run_again(tmp_path, capsys, windows):
    record_of(windows).write(str(tmp_path))
    assert cli.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{windows} windows to step {5 * windows}" in said
    assert str(tmp_path / PICTURE) in said
    assert 10_000 < (tmp_path / PICTURE).stat().st_size < 150_000


def test_summary_has_the_worst_layers_first():
    lines = summary(record_of(3)).splitlines()
    assert "layers.2" in lines[1]
    assert "1.50 of the mean, 1 experts unused" in lines[1]


def write_bad(folder, what: str) -> None:
    good = {
        "steps": np.array([5]),
        "counts": np.zeros((1, 1, 4), dtype=np.int64),
        "loss": np.zeros(1),
        "tokens_per_second": np.zeros(1),
        "layers": np.array(["a"]),
        "experts": np.array([4]),
    }
    bad = {
        "shape": {"counts": np.zeros((1, 2, 4), dtype=np.int64)},
        "negative": {"counts": np.full((1, 1, 4), -1)},
        "code": {"layers": np.array([{"a": 1}], dtype=object)},
        "words": {"loss": np.array(["much"])},
        "lengths": {"loss": np.zeros(3)},
    }
    if what == "text":
        (folder / FILE).write_text("no archive")
    elif what == "empty":
        LoadRecord(dict(LAYERS)).write(str(folder))
    elif what == "lacks":
        np.savez(folder / FILE, steps=good["steps"])
    else:
        np.savez(folder / FILE, **{**good, **bad[what]})


BAD = ["text", "empty", "lacks", "shape", "negative", "code", "words", "lengths", "missing", "no folder"]


@pytest.mark.parametrize("what", BAD)
def test_report_of_a_bad_file_is_one_line(tmp_path, capsys, what):
    if what not in ("missing", "no folder"):
        write_bad(tmp_path, what)
    run = tmp_path / "nowhere" if what == "no folder" else tmp_path
    with pytest.raises(SystemExit) as status:
        cli.main(["report", str(run)])
    assert status.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert FILE in said


def test_whatever_is_damaged_is_an_error_by_name(tmp_path):
    record_of(3).write(str(tmp_path))
    whole, draw, refused = (tmp_path / FILE).read_bytes(), random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / FILE).write_bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))])
        try:
            read_load(str(tmp_path))
        except ValueError as error:
            assert FILE in str(error)  # noqa: PT017
            refused += 1
    assert refused > 200


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    record_of(300).write(str(tmp_path))
    most = (tmp_path / FILE).stat().st_size + 1
    monkeypatch.setattr(load_record, "MOST_BYTES", most)
    with pytest.raises(ValueError, match=rf"more than {most:,} bytes"):
        read_load(str(tmp_path))


def test_without_matplotlib_it_says_how(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_fsdpturbo\[report\]', then hf-fsdpturbo report"):
        draw_load(record_of(1), str(tmp_path))
    assert load_picture.PICTURE not in os.listdir(tmp_path)
