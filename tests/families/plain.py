"""What one plain process makes of a family: its release on disk, every tensor of it, training, bf16, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.verify.random_weights import move_by_half_an_ulp
from tests.families import door
from tests.families.listing import Family
from tests.families.tiny import tiny_model
from tests.families.training import distances, train


def release(folder: Path) -> str:
    return str(folder / "release")


def load_plain(family: Family, path: str, dtype: torch.dtype = torch.float32) -> Any:
    """``from_pretrained`` in one process."""
    import transformers

    return getattr(transformers, family.architecture).from_pretrained(path, dtype=dtype)


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def prepare(family: Family, folder: Path) -> dict[str, Any]:
    """Write the release and everything that ranks compare with; returns facts for the record.

    Raises:
        whatever Transformers raises: the family cannot be built, saved, loaded or trained by it at this size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = tiny_model(family)
    made.save_pretrained(release(folder))
    model = load_plain(family, release(folder))
    tensors = {name: t.clone() for name, t in named_tensors(model).items()}
    changed = [name for name, t in named_tensors(made).items() if not torch.equal(t, tensors[name])]
    door.save(load_plain(family, release(folder)), str(folder / "saved"), generates=family.generates)
    truth = train(model)
    moved = load_plain(family, release(folder))
    move_by_half_an_ulp(moved)
    condition = distances(train(moved), truth)
    bf16 = train(load_plain(family, release(folder), torch.bfloat16), autocast=True).losses
    torch.save(
        {"tensors": tensors, "truth": truth, "condition": condition, "bf16": bf16, "changed": changed},
        folder / "plain.pt",
    )
    facts = {"layout": layout_of(folder, made), "parameters": made.num_parameters(), "loss": truth.losses[0]}
    if changed:
        facts["plain"] = f"plain save and load changes {len(changed)} tensors, {changed[0]} among them"
    return facts


def layout_of(folder: Path, model: Any) -> str:
    """How the release differs from the model: "per expert", "converted", or "as in the model"."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted((folder / "release").glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            shapes.update({key: tuple(content.get_slice(key).get_shape()) for key in content.keys()})  # noqa: SIM118
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if any(".experts.0." in key for key in shapes):
        return "per expert"
    differing = {key for key, shape in shapes.items() if own.get(key) != shape}
    return "converted" if differing else "as in the model"


def recall(folder: Path) -> dict[str, Any]:
    """What :func:`prepare` left for the ranks."""
    return torch.load(folder / "plain.pt", weights_only=False, mmap=True)
