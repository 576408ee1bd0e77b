"""Releases in MXFP4 and FP8 by path: each rank's part bit for bit what plain dequantising gives of the whole file."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import packed_releases
from tests.support.spawn import run_ranks
from tests.support.tiny_models import save_tiny
from tests.support.topologies import fresh_state, plain_arguments
from tests.support.written import tensors_of

GPT_OSS = {"hidden_size": 64, "intermediate_size": 96}  # two and three groups of 32
LAYOUTS = {
    "ep4": {"ep_size": 4},
    "ep2_efsdp2": {"ep_size": 2},
    "ep2_hsdp2": {"ep_size": 2, "efsdp_size": 1, "mp_replicate_size": 2},
}
CASES: dict[str, tuple[str, str, torch.dtype, dict[str, Any]]] = {  # name -> (family, layout, dtype, its making)
    "mxfp4": ("gpt_oss", "ep4", torch.bfloat16, {}),
    "mxfp4, an expert cut": ("gpt_oss", "ep2_efsdp2", torch.float32, {"num_experts": 2}),
    "fp8": ("qwen3_moe", "ep2_efsdp2", torch.bfloat16, {}),
    "fp8, an expert cut": ("qwen3_moe", "ep2_efsdp2", torch.float32, {"num_experts": 2, "block": (8, 32)}),
    "fp8, powers of two": ("deepseek_v3", "ep2_hsdp2", torch.bfloat16, {"scale_fmt": "ue8m0"}),
    "fp8, linear attention": ("qwen3_5_moe", "ep4", torch.bfloat16, {}),
}
EXTRA = "mtp.fc.weight"


def load(folder: str, layout: str, dtype: torch.dtype, **keywords: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo.loading.seam import load_sharded
    from hf_fsdpturbo.parallelize.order import parallelize_model

    state = fresh_state(4, **LAYOUTS[layout])
    keywords = {"device": torch.device("cpu"), "dtype": dtype, "check_loading": "full", **keywords}
    build = AutoModelForCausalLM.from_pretrained
    return load_sharded(folder, build, lambda model: parallelize_model(model, plain_arguments(), state)[0], **keywords)


def counting(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of the files that are read from now on, by key."""
    from hf_fsdpturbo.loading.open_files import OpenFiles

    counts: dict[str, int] = {}
    own = OpenFiles.read

    def read(self: OpenFiles, file: str, key: str, index: Any) -> Any:
        part = own(self, file, key, index)
        counts[key] = counts.get(key, 0) + part.numel() * part.element_size()
        return part

    patch.setattr(OpenFiles, "read", read)
    return counts


def load_all(made: dict[str, str]) -> dict[str, Any]:
    """Rank function: every case; what was read of experts; then a step of SFT that changes nothing."""
    from hf_fsdpturbo.shards import local_box, local_tensor
    from tests.support.spawn import init_gloo

    init_gloo()
    result: dict[str, Any] = {}
    for case, (_, layout, dtype, _) in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            counts = counting(patch)
            model = load(made[case], layout, dtype, check_loading="off")
        plain = torch.load(f"{made[case]}/plain.pt", weights_only=True, mmap=True)
        mine = model.state_dict()
        assert mine.keys() == plain.keys()
        for name, tensor in mine.items():
            want = plain[name][local_box(tensor).slices]
            assert tensor.dtype == want.dtype, name
            assert torch.equal(local_tensor(tensor), want), (case, name)
        assert getattr(model.config, "quantization_config", None) is None
        result[case] = counts
    load(made["mxfp4, an expert cut"], "ep2_efsdp2", torch.bfloat16, check_loading="sample")
    load(made["fp8"], "ep4", torch.float32, check_loading="full")
    result["trained"] = train(made["fp8"])
    return result


def train(source: str) -> str:
    """SFT by path at a rate of 0, with the setting that Transformers has for it; what it printed."""
    from hf_fsdpturbo import parallel_state
    from hf_fsdpturbo.loading import packed_release
    from tests.support.reference_run import Run, build_trainer
    from tests.support.tiny_models import texts

    setting = {"quant_method": "fp8", "dequantize": True}
    args = {"max_steps": 1, "learning_rate": 0.0, "weight_decay": 0.0, "save_strategy": "no"}
    kwargs = {"dtype": "float32", "quantization_config": setting}
    parallel_state._STATE = None
    packed_release._said.clear()  # this process has loaded it before
    said = io.StringIO()
    run = Run(source, {"text": texts(8)}, args, {"ep_size": 2}, model_kwargs=kwargs, gradients=False)
    with contextlib.redirect_stdout(said):
        trainer = build_trainer(run, turbo=True)
        trainer.train()
        trainer.save_model(f"{source}/saved")
    return said.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, str]:
    """Case -> folder: a packed release, and what plain Transformers makes of it in ``plain.pt``."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    result = {}
    for case, (family, _, dtype, options) in CASES.items():
        folder = str(tmp_path_factory.mktemp(family))
        packing = {name: value for name, value in options.items() if name in ("block", "scale_fmt")}
        making = {name: value for name, value in options.items() if name not in packing}
        save_tiny(family, folder, **making, **(GPT_OSS if family == "gpt_oss" else {}))
        config = Mxfp4Config if family == "gpt_oss" else FineGrainedFP8Config
        packed_releases.mxfp4(folder) if family == "gpt_oss" else packed_releases.float8(folder, **packing)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config(dequantize=True))
        torch.save(plain.state_dict(), f"{folder}/plain.pt")
        result[case] = folder
    add_unused(Path(result["fp8"]))
    return result


def add_unused(folder: Path) -> None:
    """A packed tensor that the model class has no place for."""
    file = next(folder.glob("*-00001-of-*"))
    more = {EXTRA: torch.randn(16, 8).to(torch.float8_e4m3fn), f"{EXTRA}_scale_inv": torch.rand(2, 1)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].update(dict.fromkeys(more, file.name))
    index.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def loaded(made) -> list[dict[str, Any]]:
    return run_ranks(load_all, 4, made, timeout=150)


def test_each_rank_has_its_part_bit_for_bit_and_reads_no_other(loaded, made):
    """The ranks compare; here: which experts each of them read, codes and scales, and how much."""
    for rank, found in enumerate(loaded):
        first = 4 * (rank % 2) + 2 * (rank // 2)  # ep is the inner axis; both cut dim 0
        own = {str(first), str(first + 1)}
        read = {key.split(".")[5] for key in found["fp8"] if ".experts." in key}
        assert read == own
        assert any(key.endswith("_scale_inv") for key in found["fp8"])
    for case, ways in (("mxfp4", 4), ("mxfp4, an expert cut", 4)):
        sizes = {key: t.nbytes for key, t in tensors_of(made[case]).items() if key.endswith("_blocks")}
        for key, size in sizes.items():
            parts = [found[case][key] for found in loaded]
            whole_groups = 4 / 3 if case != "mxfp4" and "down" in key else 1  # 48 of 96 columns lie in two groups each
            assert parts == [int(size / ways * whole_groups)] * 4, (case, key)


def test_it_trains_and_is_saved_in_full(loaded, made):
    saved, plain = Path(made["fp8"], "saved"), torch.load(f"{made['fp8']}/plain.pt", weights_only=True)
    assert loaded[0]["trained"].count("dequantised while they load") == 1
    assert not any("dequantised" in found["trained"] for found in loaded[1:])
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    written = tensors_of(saved)
    assert not any("scale_inv" in key for key in written)
    release = tensors_of(made["fp8"])
    want = release[EXTRA].float() * release[f"{EXTRA}_scale_inv"].repeat_interleave(8, 0)
    assert torch.equal(written[EXTRA], want.bfloat16())
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_same(made, case):
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo.loading.seam import load_whole

    model = load_whole(made[case], AutoModelForCausalLM.from_pretrained, dtype=CASES[case][2])
    plain = torch.load(f"{made[case]}/plain.pt", weights_only=True)
    mine = model.state_dict()
    assert mine.keys() == plain.keys()
    assert all(mine[name].dtype == want.dtype and torch.equal(mine[name], want) for name, want in plain.items())
    assert not hasattr(model.config, "quantization_config")
