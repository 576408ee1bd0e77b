"""``python -m tests.families.pictures``: do vision-language families train on images as one plain process does?

Five optimizer steps of four micro-batches: images on all ranks, on one, on none, in one micro-batch of one rank, on
all again. Loss and every gradient of each step, and the weights after the last, within 1e-5, or ten times what half an
ulp in the weights does. Not part of the record: it asks few families.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.families import door
from tests.families.checks import ILL_CONDITIONED, TOLERANCE
from tests.families.listing import Family, families
from tests.families.overrides import OVERRIDES
from tests.families.plain import load_plain, move_by_half_an_ulp
from tests.families.tiny import tiny_model
from tests.families.training import EPSILON, RATE, Trained, distances, whole
from tests.support.spawn import RankError, init_gloo, run_plain, run_ranks

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "gemma4", "ernie4_5_vl_moe", "minimax_m3_vl", "qwen4_exp")
STEPS = ((1, 1, 1, 1), (0, 1, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1))
"""Whether each micro-batch of a step has images. Ranks take turns: of two, the first has those of even number."""
ROWS, TEXT, GRID = 2, 12, (1, 4, 6)
LAST_ID = 340

OVERRIDES["qwen3_vl_moe"] = {"vision_config.deepstack_visual_indexes": [0, 1]}  # of two blocks
OVERRIDES["gemma4"] = {
    **OVERRIDES["gemma4"],
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "patch_size": 4,
        "position_embedding_size": 64,
    },
    "image_token_id": 350,
    "text_config.use_bidirectional_attention": "vision",
}  # fmt: skip


def batch(config: Any, number: int, with_images: bool) -> dict[str, Any]:
    """One micro-batch, the same for every process; rows with images have as many tokens as those without."""
    draw = torch.Generator().manual_seed(number)
    merged = GRID[1] * GRID[2] // 4
    ids = torch.randint(3, LAST_ID, (ROWS, TEXT + merged), generator=draw)
    if not with_images:
        return {"input_ids": ids, "labels": ids}
    kinds = torch.zeros_like(ids)
    kinds[:, 4 : 4 + merged] = 1
    ids[:, 4 : 4 + merged] = config.image_token_id
    vision, patches = config.vision_config, GRID[1] * GRID[2]
    inputs = {"input_ids": ids, "labels": ids.masked_fill(kinds > 0, -100), "mm_token_type_ids": kinds}
    if "gemma4" in config.model_type:
        places = torch.stack([torch.arange(patches) % GRID[2], torch.arange(patches) // GRID[2]], dim=-1)
        pixels = torch.rand(ROWS, patches, 3 * vision.patch_size**2, generator=draw)
        return {**inputs, "pixel_values": pixels, "image_position_ids": places.expand(ROWS, -1, -1).clone()}
    times = 1 if "ernie" in config.model_type else vision.temporal_patch_size
    pixels = torch.randn(ROWS * patches, 3 * times * vision.patch_size**2, generator=draw)
    if "ernie" in config.model_type:
        inputs["moe_mm_token_type_ids"] = kinds
    if "minimax" in config.model_type:
        del inputs["mm_token_type_ids"]
    return {**inputs, "pixel_values": pixels, "image_grid_thw": torch.tensor([GRID] * ROWS)}


def train(
    model: Any, place: tuple[int, int] = (0, 1), settle: Callable[[Any], None] | None = None, bf16: bool = False
) -> Trained:
    """Train in place on this rank's micro-batches; gradients of every step under its number."""
    model.train()
    rank, ranks = place
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, eps=EPSILON, foreach=False, weight_decay=0.1
    )
    result = Trained()
    for step, images in enumerate(STEPS):
        own = [batch(model.config, 4 * step + i, bool(images[i])) for i in range(rank, 4, ranks)]
        total = torch.zeros(())
        for inputs in own:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**inputs, use_cache=False).loss.float() / len(own)
            loss.backward()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        result.losses.append(float(total))
        if settle is not None:
            settle(model)
        named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        result.gradients |= {f"{name}, step {step}": whole(p.grad) for name, p in named}
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {name: whole(p) for name, p in model.named_parameters()}
    return result


def prepare(family: Family, folder: str) -> str:
    """One plain process: the release, and what it makes of the batches. Returns what never had a gradient."""
    path = str(Path(folder) / family.name)
    tiny_model(family).save_pretrained(path)
    truth = train(load_plain(family, path))
    moved = load_plain(family, path)
    move_by_half_an_ulp(moved)
    bf16 = train(load_plain(family, path), bf16=True).losses
    found = {"truth": truth, "condition": distances(train(moved), truth), "bf16": bf16}
    torch.save(found, Path(path) / "pictures.pt")
    first = {name.rpartition(",")[0] for name in truth.gradients if name.endswith("step 0")}
    return ", ".join(sorted(truth.weights.keys() - first))


def settle(model: Any) -> None:
    """What the trainer does before it clips."""
    from hf_fsdpturbo.images import tower_use

    watch = tower_use(model)
    assert watch is not None
    watch.settle()
    door.settle(model)


def compare(family: Family, folder: str, layout: str) -> str:
    """Rank function: float32 against the plain process, and the losses of a bf16 run."""
    init_gloo(timeout=60)
    path = Path(folder) / family.name
    found = torch.load(path / "pictures.pt", weights_only=False)
    model = door.load(str(path), layout, with_images=True)
    off = distances(train(model, door.data_place(layout), settle), found["truth"])
    allowed = {name: max(TOLERANCE, ILL_CONDITIONED * found["condition"].get(name, 0.0)) for name in off}
    bad = [name for name in off if not off[name] <= allowed[name]]
    worst = max(bad or off, key=lambda name: off[name] / allowed[name])
    text = f"{len(bad)} of {len(off)} out of tolerance; worst {worst}: {off[worst]:.1e} (allowed {allowed[worst]:.0e})"
    losses = train(door.load(str(path), layout, bf16=True, with_images=True), door.data_place(layout), settle).losses
    bf16 = max(abs(a - b) / abs(b) for a, b in zip(losses, found["bf16"], strict=True))
    return f"{'WRONG' if bad or not bf16 < 1e-3 else 'right'}: {text}; bf16 losses {bf16:.1e} from plain's"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.families.pictures", description=__doc__)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--layouts", default="ep2", help=f"of {', '.join(door.LAYOUTS)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pictures_") as folder:
        for name in options.only.split(","):
            family = families()[name]
            print(f"{name}: never a gradient: {run_plain(prepare, family, folder, timeout=120) or 'none'}", flush=True)
            for layout in options.layouts.split(","):
                try:
                    found = run_ranks(compare, door.world_of(layout), family, folder, layout, timeout=150)[0]
                except RankError as error:
                    found = f"FAILED: {error}"
                print(f"{name} {layout}: {found}", flush=True)


if __name__ == "__main__":
    main()
