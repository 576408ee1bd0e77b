"""Training throughput of one mode: a Qwen3-30B-A3B-shaped model, fewer layers, through TRL's SFTTrainer; one JSON
line.

Modes: `turbo` (ours), `native` (Transformers' own EP), `fsdp2` (accelerate FSDP2, started by `accelerate launch`),
`trl` (plain SFTTrainer in one process; with `--fused-experts` after `enable_fused_experts`). The same model, data,
order and optimizer in each; `--make` writes the checkpoint first. Losses of modes that store alike must agree step by
step, or the speed means nothing.
"""

import argparse
import json
import os
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.trainer_callback import TrainerCallback
from trl import SFTConfig, SFTTrainer

PEAK_FLOPS = 790e12  # a bf16 matrix product of random data on one H200, measured
ON_GPU = torch.cuda.is_available()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["turbo", "native", "fsdp2", "trl"], default="turbo")
    parser.add_argument("--make", action="store_true", help="write the checkpoint and stop")
    parser.add_argument("--checkpoint", default="checkpoint")
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a rehearsal on CPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dispatcher", default="fused", help="turbo only")
    parser.add_argument("--storage", default="auto", help="turbo and trl: dtype of the weights")
    parser.add_argument("--optim", default="auto", help="turbo only: optim_implementation (torch: none of ours)")
    parser.add_argument("--lm-head", choices=["auto", "on", "off"], default="auto", help="turbo only: ours, or TRL's")
    parser.add_argument("--fused-experts", action="store_true", help="trl only: our expert block by one line")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--recompute", default="full", help="turbo only, with --checkpointing: full or selective")
    parser.add_argument("--liger", action="store_true", help="liger's rope and rms_norm")
    parser.add_argument("--liger-experts", action="store_true", help="trl only, with --liger: its fused MoE")
    parser.add_argument("--profile", default=None, help="write a breakdown of one step's GPU time to this file")
    parser.add_argument("--trace", default=None, help="with --profile: that step for chrome://tracing (.json.gz)")
    parser.add_argument("--out", default=None, help="append the JSON line to this file")
    return parser.parse_args()


def model_config(a):
    if a.tiny:
        return Qwen3MoeConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
            norm_topk_prob=True, max_position_embeddings=1024,
        )  # fmt: skip
    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=a.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960, rope_theta=1e6,
    )  # fmt: skip


def make_checkpoint(a, config):
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, a.dtype))
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = Qwen3MoeForCausalLM(config)
    model.to("cpu").save_pretrained(a.checkpoint)
    vocab = {f"t{i}": i for i in range(config.vocab_size - 2)}
    vocab |= {"<unk>": config.vocab_size - 2, "<eos>": config.vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(a.checkpoint)
    print(f"checkpoint of {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters in {a.checkpoint}")


def make_dataset(a, config, world):
    """Token ids with a skewed frequency, so that routing is neither uniform nor degenerate."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(a.batch * world * a.steps, a.sequence, generator=generator)
    return Dataset.from_dict({"input_ids": (draws**3 * (config.vocab_size - 2)).long().tolist()})


class Meter(TrainerCallback):
    """Wall clock of the steps after the warm-up; profiles the last step but one, outside the clock."""

    def __init__(self, a, rank):
        self.a, self.rank, self.first_step_s = a, rank, None
        self.losses, self.norms, self.profiler = [], [], None
        self.last = a.steps - (2 if a.profile else 0)
        self.born = time.perf_counter()

    def now(self):
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.a.warmup:
            self.start = self.now()
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
        if self.a.profile and state.global_step == self.a.steps - 2:
            from torch.profiler import ProfilerActivity, profile

            self.now()
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.__enter__()
            self.profile_start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.first_step_s = self.now() - self.born
        if state.global_step == self.last:
            self.seconds = (self.now() - self.start) / (self.last - self.a.warmup)
        if self.profiler is not None:
            wall = self.now() - self.profile_start
            self.profiler.__exit__(None, None, None)
            if self.rank == 0:
                write_breakdown(self.profiler, wall, self.a.profile)
                if self.a.trace:
                    self.profiler.export_chrome_trace(self.a.trace)
            self.profiler = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(round(float(logs["loss"]), 4))
            self.norms.append(round(float(logs.get("grad_norm", -1)), 4))


# First match wins; names are those of CUDA kernels.
KINDS = [
    ("exchange and FSDP collectives", ("nccl",)),
    ("our index, copy and SwiGLU kernels", ("_scatter_kernel", "_gather_sum_kernel", "_swiglu", "_count_kernel",
                                           "_place_kernel", "_start_kernel", "_slot_kernel", "_write_pairs")),
    ("our LM head's kernel", ("_cross_entropy_kernel",)),
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("grouped matmul", ("grouped", "GroupProblemShape", "PtrArray")),
    ("dense matmul", ("gemm", "cutlass", "nvjet", "cublas")),
    ("optimizer and foreach", ("multi_tensor", "foreach", "adam", "_square_sum", "_scale_kernel")),
    ("liger", ("_rms_norm", "_triton_rope")),
    ("copies and fills", ("memcpy", "memset", "copy_kernel", "fillfunctor", "catarray")),
]  # fmt: skip


def write_breakdown(profiler, wall, path):
    """GPU milliseconds of one step by kind of kernel, the 15 largest kernels, and what the GPU was idle."""
    kinds, kernels, intervals = {}, {}, []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.time_range.elapsed_us() <= 0:
            continue
        name = event.name.lower()
        kind = next((kind for kind, words in KINDS if any(word.lower() in name for word in words)), "other kernels")
        ms = event.time_range.elapsed_us() / 1e3
        kinds[kind] = kinds.get(kind, 0) + ms
        count, total = kernels.get(event.name, (0, 0))
        kernels[event.name] = (count + 1, total + ms)
        intervals.append((event.time_range.start, event.time_range.end, event.name))
    busy, before, gaps = 0.0, "", []
    end = min(start for start, *_ in intervals)
    for start, stop, name in sorted(intervals):
        if start > end:
            gaps.append((start - end, before, name))
        busy += max(0.0, stop - max(start, end))
        if stop >= end:
            end, before = stop, name
    lines = [
        f"step {wall * 1e3:.1f} ms under the profiler, GPU busy {busy / 1e3:.1f} ms (kinds overlap across streams)"
    ]
    lines += [f"{ms:9.2f} ms  {kind}" for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])]
    top = sorted(kernels.items(), key=lambda item: -item[1][1])[:25]
    lines += ["", *(f"{ms:9.2f} ms x{count:<5d} {name[:110]}" for name, (count, ms) in top)]
    idle = sum(gap for gap, *_ in gaps)
    lines += ["", f"{idle / 1e3:9.2f} ms  idle between kernels, {len(gaps)} times; the longest:"]
    lines += [f"{gap / 1e3:9.2f} ms  {a[:60]}  ->  {b[:60]}" for gap, a, b in sorted(gaps, reverse=True)[:15]]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def make_trainer(a, config, meter, world):
    common = dict(
        output_dir="out", per_device_train_batch_size=a.batch, max_steps=a.steps, logging_steps=1, report_to=[],
        save_strategy="no", max_length=a.sequence, packing=False, learning_rate=1e-5, bf16=a.dtype == "bfloat16",
        gradient_checkpointing=a.checkpointing, dataloader_num_workers=0, seed=0, data_seed=0, disable_tqdm=True,
        lr_scheduler_type="constant", use_cpu=not ON_GPU,
    )  # fmt: skip
    if a.liger:
        off = dict(swiglu=a.liger_experts, cross_entropy=False, fused_linear_cross_entropy=False)
        common |= dict(use_liger_kernel=True, liger_kernel_config=dict(rope=True, rms_norm=True, **off))
    init = dict(dtype=a.dtype, attn_implementation="sdpa", experts_implementation="grouped_mm")
    data = dict(train_dataset=make_dataset(a, config, world), callbacks=[meter])
    if a.mode == "turbo":
        from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

        params = dict(ep_size=a.ep, ep_dispatcher=a.dispatcher, param_storage_dtype=a.storage)
        common |= dict(optim_implementation=a.optim, recompute=a.recompute)
        rehearsed = a.tiny and a.lm_head == "auto"  # which is TRL's on CPU
        common["fused_linear_cross_entropy"] = "on" if rehearsed else a.lm_head
        args = FSDPTurboSFTConfig(**common, model_init_kwargs=init, dist_config=dict(name="fsdpturbo", **params))
        return FSDPTurboSFTTrainer(model=a.checkpoint, args=args, **data)
    if a.mode == "fsdp2":
        args = SFTConfig(**common, model_init_kwargs=init)
        return SFTTrainer(model=a.checkpoint, args=args, **data)
    if a.mode == "trl":
        init["dtype"] = a.storage if a.storage != "auto" else a.dtype
        trainer = SFTTrainer(model=a.checkpoint, args=SFTConfig(**common, model_init_kwargs=init), **data)
        if a.fused_experts:
            from hf_fsdpturbo import enable_fused_experts

            enable_fused_experts(trainer.model)
        return trainer
    from transformers.distributed import DistributedConfig

    args = SFTConfig(**common)
    args.device  # noqa: B018  (initialises the process group)
    init["dtype"] = getattr(torch, a.dtype)
    distributed = DistributedConfig(fsdp_size=world, ep_size=a.ep)
    model = AutoModelForCausalLM.from_pretrained(a.checkpoint, distributed_config=distributed, **init)
    return SFTTrainer(model=model, args=args, **data)


def flops_per_token(config, sequence):
    """Six times the active matmul parameters, and causal attention."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    attention = hidden * config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    experts = 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
    active = layers * (attention + experts + hidden * config.num_experts) + hidden * config.vocab_size
    return 6 * active + 6 * layers * sequence * config.head_dim * config.num_attention_heads


def main():
    a = arguments()
    config = model_config(a)
    if a.make:
        return make_checkpoint(a, config)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    meter = Meter(a, rank)
    trainer = make_trainer(a, config, meter, world)
    trainer.train()
    if rank == 0:
        rate = a.batch * a.sequence / meter.seconds
        result = dict(
            mode=a.mode, dispatcher=a.dispatcher if a.mode == "turbo" else "-", storage=a.storage, layers=a.layers,
            checkpointing=a.checkpointing, recompute=a.recompute if a.checkpointing else "-", liger=a.liger,
            world=world, ep=a.ep, optim=a.optim,
            lm_head=a.lm_head if a.mode == "turbo" else "-",
            ms_step=round(meter.seconds * 1e3, 1), tokens_s_gpu=round(rate),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if ON_GPU else None,
            mfu=round(rate * flops_per_token(config, a.sequence) / PEAK_FLOPS, 4),
            start_to_first_step_s=round(meter.first_step_s, 1), losses=meter.losses, norms=meter.norms,
        )  # fmt: skip
        print("RESULT " + json.dumps(result), flush=True)
        if a.out:
            with open(a.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
