"""NF4 LoRA against bf16 LoRA in one process: tokens a second and peak GiB, one line of JSON for each and a table.

    python3 -m benchmarks.qlora                       # Qwen3-30B-A3B's shape, 16 layers, on one GPU: about 4 minutes
    python3 -m benchmarks.qlora --layers 48 --only nf4
    python3 -m benchmarks.qlora --tiny                # a rehearsal on CPU

Weights are random and made on the device; nothing is downloaded or written. Each run is a process of its own, of
`FSDPTurboSFTTrainer` with a model object, the same data in the same order. `attention` adapts q, k, v and o; `experts`
the stacked experts as well. The losses of the two storages must be close, or the speed means nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

STORAGES = ("bf16", "nf4")
TARGETS = ("attention", "experts")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a rehearsal on CPU")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    parser.add_argument("--nested", action="store_true", help="double quantisation")
    parser.add_argument("--no-checkpointing", action="store_true", help="without activation checkpointing")
    parser.add_argument("--only", choices=STORAGES, default=None)
    parser.add_argument("--targets", choices=TARGETS, default=None, help="one of them; both are run without it")
    parser.add_argument("--out", default=None, help="append the JSON lines to this file")
    parser.add_argument("--one", nargs=2, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(config: Any, device: str) -> Any:
    """Random bf16 weights on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    torch.set_default_dtype(before)
    return model


def make_tokenizer(size: int) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{i}": i for i in range(size - 2)} | {"<unk>": size - 2, "<eos>": size - 1}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")


def make_data(a: argparse.Namespace, config: Any) -> Any:
    """Token ids with a skewed frequency, so that routing is neither uniform nor degenerate."""
    import torch
    from datasets import Dataset

    draws = torch.rand(a.batch * a.steps, a.sequence, generator=torch.Generator().manual_seed(1))
    return Dataset.from_dict({"input_ids": (draws**3 * (config.vocab_size - 2)).long().tolist()})


def make_trainer(a: argparse.Namespace, storage: str, targets: str, callback: Any) -> Any:
    import torch
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    from benchmarks.train_throughput import model_config
    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

    config, on_gpu = model_config(a), torch.cuda.is_available()
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if targets == "experts" else None
    lora = LoraConfig(
        r=a.rank, lora_alpha=2 * a.rank, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=experts,
    )  # fmt: skip
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=a.nested)
    args = FSDPTurboSFTConfig(
        output_dir="out", per_device_train_batch_size=a.batch, max_steps=a.steps, logging_steps=1, report_to=[],
        save_strategy="no", max_length=a.sequence, packing=False, learning_rate=1e-4, bf16=True,
        gradient_checkpointing=not a.no_checkpointing, dataloader_num_workers=0, seed=0, data_seed=0,
        disable_tqdm=True, lr_scheduler_type="constant", use_cpu=not on_gpu,
        dist_config={"name": "fsdpturbo", "ep_dispatcher": "fused"},
    )  # fmt: skip
    return FSDPTurboSFTTrainer(
        model=make_model(config, "cuda" if on_gpu else "cpu"), args=args, train_dataset=make_data(a, config),
        processing_class=make_tokenizer(config.vocab_size), peft_config=lora, callbacks=[callback],
        quantization_config=bits if storage == "nf4" else None,
    )  # fmt: skip


def run_one(a: argparse.Namespace, storage: str, targets: str) -> None:
    """One run in this process; prints a line of JSON."""
    import gc

    import torch
    from transformers import TrainerCallback

    on_gpu = torch.cuda.is_available()
    gib = 2.0**30

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Meter(TrainerCallback):
        def __init__(self) -> None:
            self.start = self.end = 0.0
            self.losses: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == a.warmup:
                self.start = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == a.steps:
                self.end = now()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.losses.append(round(float(logs["loss"]), 4))

    meter = Meter()
    trainer = make_trainer(a, storage, targets, meter)
    gc.collect()
    held = None
    if on_gpu:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated() / gib
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = (meter.end - meter.start) / (a.steps - a.warmup)
    result = {
        "storage": storage, "targets": targets, "layers": trainer.model.config.num_hidden_layers, "nested": a.nested,
        "checkpointing": not a.no_checkpointing, "tokens_a_step": a.batch * a.sequence,
        "ms_step": round(seconds * 1e3, 1), "tokens_s": round(a.batch * a.sequence / seconds),
        "weights_gib": held and round(held, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / gib, 2) if on_gpu else None, "losses": meter.losses,
    }  # fmt: skip
    print("RESULT " + json.dumps(result), flush=True)


def main() -> int:
    a = arguments()
    if a.tiny:
        a.sequence, a.steps, a.warmup = min(a.sequence, 64), min(a.steps, 4), 1
    if a.one is not None:
        run_one(a, *a.one)
        return 0
    results = []
    for targets in [a.targets] if a.targets else TARGETS:
        for storage in [a.only] if a.only else STORAGES:
            command = [sys.executable, "-m", "benchmarks.qlora", *sys.argv[1:], "--one", storage, targets]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=540).stdout
            lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(output[-3000:])
                print(f"{storage} {targets}: no result", flush=True)
                continue
            print(lines[-1], flush=True)
            results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    if a.out:
        with open(a.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    print("| adapters on | weights | tokens a second | GiB held before training | peak GiB | last loss |")
    print("|---|---|---|---|---|---|")
    for r in results:
        row = (r["targets"], r["storage"], r["tokens_s"], r["weights_gib"], r["peak_gib"], r["losses"][-1])
        print("| " + " | ".join(map(str, row)) + " |")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
