"""Long sequences on two GPUs: tokens a second and peak memory at 32k and 128k tokens, cp_size 1 against cp_size 2.

    python benchmarks/context_parallel.py --out DIRECTORY          two GPUs, about 8 minutes
    python benchmarks/context_parallel.py --tiny --out DIRECTORY   the same on CPU over gloo: a rehearsal

At cp_size 1 each rank trains on a sequence of its own, at cp_size 2 both on the one and then on the other: a step is
two sequences in both, and their losses must agree, or the speed means nothing. ep_size is 1, so that only the sequence
is cut differently. Each case runs in processes of its own under its own time limit; running out of memory is a result
and is listed. The model is Qwen3-30B-A3B in shape with few layers; with --model qwen3_5 three of four are linear.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small model and lengths, on CPU")
    parser.add_argument("--out", default="outputs/context_parallel")
    parser.add_argument("--model", choices=["qwen3", "qwen3_5"], default="qwen3")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit", type=int, default=150, help="seconds a case may take")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # "cp,length": one rank of one case
    a = parser.parse_args()
    a.lengths = a.lengths or ([256, 512] if a.tiny else [32768, 131072])
    return a


def make_config(a):
    from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig

    sizes = dict(vocab_size=512, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                 moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)  # fmt: skip
    if not a.tiny:
        sizes = dict(vocab_size=151936, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                     moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)  # fmt: skip
    sizes |= dict(num_hidden_layers=a.layers, max_position_embeddings=262144)
    if a.model == "qwen3":
        return Qwen3MoeConfig(**sizes, norm_topk_prob=True, intermediate_size=6144)
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    if not a.tiny:
        heads = dict(linear_num_key_heads=16, linear_num_value_heads=32)
    return Qwen3_5MoeTextConfig(**sizes, **heads, shared_expert_intermediate_size=sizes["moe_intermediate_size"])


def train(a, cp_size, length):
    """One rank of one case: trains and prints one JSON line (rank 0)."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

    on_gpu = not a.tiny
    rank = int(os.environ["RANK"])
    args = FSDPTurboSFTConfig(
        output_dir=a.out, cp_size=cp_size, per_device_train_batch_size=1, gradient_accumulation_steps=cp_size,
        max_steps=a.steps + a.warmup, max_length=length, logging_steps=1, report_to=[],
        save_strategy="no", learning_rate=1e-5, bf16=on_gpu, use_cpu=not on_gpu,
        gradient_checkpointing=not a.no_checkpointing, disable_tqdm=True, seed=0, lr_scheduler_type="constant",
        dist_config={"ep_dispatcher": "fused", "param_storage_dtype": "bfloat16" if on_gpu else "auto"},
    )  # fmt: skip
    config = make_config(a)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation="sdpa"
        )
    draws = torch.rand(2 * (a.steps + a.warmup), length, generator=torch.Generator().manual_seed(1))
    ids = (draws**3 * (config.vocab_size - 2)).long()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<u>": 0}, unk_token="<u>")), eos_token="<u>", pad_token="<u>"
    )

    class Meter(TrainerCallback):
        losses, start, seconds = [], 0.0, 0.0

        def now(self):
            if on_gpu:
                torch.accelerator.synchronize()
            return time.perf_counter()

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == a.warmup:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                self.start = self.now()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds = self.now() - self.start

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.losses.append(round(float(logs["loss"]), 4))

    meter = Meter()
    trainer = FSDPTurboSFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=tokenizer, callbacks=[meter],
    )  # fmt: skip
    trainer.train()
    if rank == 0:
        world = int(os.environ["WORLD_SIZE"])
        tokens = length * world * a.steps
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        result = {"model": a.model, "cp_size": cp_size, "length": length, "tokens_per_s": tokens / meter.seconds,
                  "s_per_step": meter.seconds / a.steps, "peak_GiB": peak, "losses": meter.losses}  # fmt: skip
        print("RESULT " + json.dumps(result), flush=True)


def run_case(a, cp_size, length, out):
    """Two ranks as processes of their own; their result, or what became of them."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    words += ["--case", f"{cp_size},{length}", "--out", str(out), "--model", a.model, "--layers", str(a.layers)]
    words += ["--steps", str(a.steps), "--warmup", str(a.warmup)]
    words += ["--tiny"] * a.tiny + ["--no-checkpointing"] * a.no_checkpointing
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **({"OMP_NUM_THREADS": "1"} if a.tiny else {})}
    log = out / f"{a.model}_cp{cp_size}_{length}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(a.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return {"cp_size": cp_size, "length": length, "failed": f"not done after {a.limit} s"}
    text = log.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    memory = "OutOfMemoryError" in text
    return {"cp_size": cp_size, "length": length, "failed": "out of memory" if memory else f"failed, see {log.name}"}


def main():
    a = parse()
    if a.case:
        train(a, *map(int, a.case.split(",")))
        return
    out = Path(a.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    print("| model | length | cp_size | tokens/s | s/step | peak GiB | first loss |\n|---|---|---|---|---|---|---|")
    for length in a.lengths:
        for cp_size in (1, 2):
            r = run_case(a, cp_size, length, out)
            results.append(r)
            if "failed" in r:
                print(f"| {a.model} | {length} | {cp_size} | {r['failed']} | | | |", flush=True)
                continue
            peak = "-" if r["peak_GiB"] is None else f"{r['peak_GiB']:.1f}"
            print(
                f"| {a.model} | {length} | {cp_size} | {r['tokens_per_s']:.0f} | {r['s_per_step']:.2f} | {peak} | "
                f"{r['losses'][0]:.4f} |", flush=True,
            )  # fmt: skip
    (out / f"context_parallel_{a.model}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
