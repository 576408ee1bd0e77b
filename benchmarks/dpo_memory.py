"""Memory of a rank in DPO against SFT of the same model: what the reference model costs, however it is kept.

    python benchmarks/dpo_memory.py                 # two CPU ranks, EP 2
    python benchmarks/dpo_memory.py --ranks 4

Each mode is a run of its own: SFT; DPO with a second, sharded model as the reference; with its log-probabilities
precomputed; with LoRA, whose reference is the base model. Printed, of the largest rank: bytes of weights (policy and
reference) that live on it; the peak over its value before the trainer was built; the ratio to SFT; and, on paper, the
weights of a rank that keeps the reference whole, which is what a plain trainer does.
On CPU the peak is of anonymous memory (RssAnon of /proc/self/status, every millisecond).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.loading_memory import PeakMeter

MODES = ("sft", "dpo", "dpo precomputed", "dpo lora")
MEBI = 2**20


def local_bytes(model: Any) -> int:
    """Bytes of weights on this rank."""
    from torch.distributed.tensor import DTensor

    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(part.numel() * part.element_size() for part in parts)


def run(path: str, data: str, mode: str) -> dict[str, int]:
    """Rank function: two steps of one mode."""
    from datasets import Dataset

    import hf_fsdpturbo
    from tests.support.adapter_runs import lora
    from tests.support.tiny_models import tiny_tokenizer

    family = "SFT" if mode == "sft" else "DPO"
    args = getattr(hf_fsdpturbo, f"FSDPTurbo{family}Config")(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        ep_size=2,
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=64,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"precompute_ref_log_probs": True} if "precomputed" in mode else {}),
    )
    rows = Dataset.load_from_disk(data)
    if family == "SFT":
        rows = rows.rename_column("chosen", "completion").remove_columns("rejected")
    with PeakMeter() as meter:
        trainer = getattr(hf_fsdpturbo, f"FSDPTurbo{family}Trainer")(
            model=path,
            args=args,
            train_dataset=rows,
            processing_class=tiny_tokenizer(),
            peft_config=lora() if "lora" in mode else None,
        )
        trainer.train()
    reference = getattr(trainer, "ref_model", None)
    return {
        "policy": local_bytes(trainer.model),
        "reference": 0 if reference is None else local_bytes(reference),
        "whole": sum(p.numel() * p.element_size() for p in trainer.model.parameters()),
        "peak": meter.peak,
    }


def main() -> None:
    from datasets import Dataset

    from tests.support.preference_runs import pairs
    from tests.support.spawn import run_ranks
    from tests.support.tiny_models import save_tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = {"hidden_size": given.hidden, "moe_intermediate_size": given.hidden // 2, "layers": given.layers}
        path = save_tiny("qwen3_moe", Path(folder) / "model", num_experts=16, **size)
        data = str(Path(folder) / "data")
        Dataset.from_dict(pairs(16 * given.ranks)).save_to_disk(data)
        found = {mode: run_ranks(run, given.ranks, path, data, mode, timeout=300) for mode in MODES}
    largest = {mode: {key: max(rank[key] for rank in ranks) for key in ranks[0]} for mode, ranks in found.items()}
    base = largest["sft"]
    print(f"{'mode':16} {'weights MiB':>12} {'peak MiB':>9} {'to SFT':>7}   weights with a whole reference MiB")
    for mode, row in largest.items():
        weights, whole = row["policy"] + row["reference"], row["policy"] + base["whole"]
        paper = f"{whole / MEBI:.0f}" if mode == "dpo" else "-"
        ratio = row["peak"] / base["peak"]
        print(f"{mode:16} {weights / MEBI:12.0f} {row['peak'] / MEBI:9.0f} {ratio:7.2f}   {paper}")


if __name__ == "__main__":
    main()
