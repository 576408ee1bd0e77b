"""Everything that needs GPUs, in one command under one deadline: the MoE block, the exchange, then whole training
steps side by side.

    python3 benchmarks/gpu_session.py --out DIRECTORY              two GPUs, about 8 minutes
    python3 benchmarks/gpu_session.py --one-gpu --out DIRECTORY    one GPU, about 9 minutes: whole steps in one process
    python3 benchmarks/gpu_session.py --tiny --out DIRECTORY       the same on CPU over gloo: a rehearsal

Every step is a process of its own with its own time limit; one that fails or no longer fits before the deadline is
listed as such and
the rest goes on. Tables come last, a picture lies in the directory beside the logs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FSDP2_YAML = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
mixed_precision: '{mixed_precision}'
num_machines: 1
num_processes: {processes}
use_cpu: {use_cpu}
"""

# name -> (launcher, extra arguments, seconds it may take); trained in this order
TRAINING = {
    "turbo fused": ("torchrun", ["--mode", "turbo", "--dispatcher", "fused", "--storage", "bfloat16"], 110),
    "turbo selective": ("torchrun", ["--mode", "turbo", "--recompute", "selective", "--storage", "bfloat16"], 110),
    "native": ("torchrun", ["--mode", "native"], 110),
    "turbo domino": ("torchrun", ["--mode", "turbo", "--dispatcher", "domino", "--storage", "bfloat16"], 90),
    "turbo eager": ("torchrun", ["--mode", "turbo", "--dispatcher", "eager", "--storage", "bfloat16"], 90),
    "turbo auto": ("torchrun", ["--mode", "turbo", "--dispatcher", "auto", "--storage", "bfloat16"], 110),
    "fsdp2": ("accelerate", ["--mode", "fsdp2"], 140),
    "turbo fused TRL head": (
        "torchrun", ["--mode", "turbo", "--dispatcher", "fused", "--storage", "bfloat16", "--lm-head", "off"], 110,
    ),
    "turbo fused fp32": ("torchrun", ["--mode", "turbo", "--dispatcher", "fused", "--storage", "float32"], 110),
    "turbo fused torch-adamw": ("torchrun", ["--mode", "turbo", "--storage", "bfloat16", "--optim", "torch"], 90),
    "turbo fused fp32 torch-adamw": ("torchrun", ["--mode", "turbo", "--storage", "float32", "--optim", "torch"], 110),
}
PAIRS = [("turbo fused", "native"), ("turbo eager", "native"), ("turbo domino", "native"), ("turbo auto", "native"),
         ("turbo fused", "turbo fused TRL head"),
         ("turbo fused fp32", "fsdp2"), ("turbo fused", "turbo fused torch-adamw"),
         ("turbo fused fp32", "turbo fused fp32 torch-adamw"), ("turbo selective", "turbo fused")]  # fmt: skip

# One process: (work, its arguments, rows of it); "today" is the product without our expert block and LM head.
ONE_GPU = [
    ("8 layers bf16", ["--layers", "8", "--batch", "4"], "bfloat16",
     ("trl", "ours", "today", "trl + ours", "auto", "ours torch-adamw", "ours with TRL head", "trl + liger experts")),
    ("8 layers float32", ["--layers", "8", "--batch", "2"], "float32", ("trl", "ours", "today", "ours torch-adamw")),
    ("16 layers recompute", ["--layers", "16", "--batch", "4", "--checkpointing"], "bfloat16",
     ("trl", "ours", "selective", "today")),
]  # fmt: skip
ONE_GPU_ROWS = {
    "trl": ["--mode", "trl"],
    "today": ["--mode", "turbo", "--ep", "1", "--dispatcher", "eager", "--optim", "torch", "--lm-head", "off"],
    "ours": ["--mode", "turbo", "--ep", "1", "--dispatcher", "fused"],
    "ours torch-adamw": ["--mode", "turbo", "--ep", "1", "--dispatcher", "fused", "--optim", "torch"],
    "selective": ["--mode", "turbo", "--ep", "1", "--dispatcher", "fused", "--recompute", "selective"],
    "ours with TRL head": ["--mode", "turbo", "--ep", "1", "--dispatcher", "fused", "--lm-head", "off"],
    "auto": ["--mode", "turbo", "--ep", "1", "--dispatcher", "auto"],
    "trl + ours": ["--mode", "trl", "--fused-experts"],
    "trl + liger experts": ["--mode", "trl", "--liger-experts"],
}
ONE_GPU_SECONDS = {"trl + liger experts": 420}  # it tunes for minutes before its first step; others: 120


def cause(text):
    """Of a failed step's log: the last error in front of the launcher's own report, with the lines that led to it."""
    before = text.split("ChildFailedError")[0].splitlines()
    lines = [line for line in before if "Warning" not in line and "torch/distributed/" not in line]
    at = max((i for i, line in enumerate(lines) if "Error" in line), default=len(lines) - 1)
    return "\n".join(lines[max(0, at - 14) : at + 4])


class Session:
    """Runs steps until the deadline; remembers what became of each."""

    def __init__(self, a):
        self.a = a
        self.out = Path(a.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + a.minutes * 60
        self.outcome = {}
        # The exchange stays off NVLink multicast where the environment says so; nothing is added to it but the path.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
        if a.tiny:
            self.environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

    def wants(self, name):
        return not self.a.only or any(word in name for word in self.a.only.split(","))

    def step(self, name, command, limit, tail=12):
        """Run one command; its log goes to a file, its last lines to the screen."""
        left = self.deadline - time.monotonic()
        if not self.wants(name):
            return None
        if left < min(limit, 20):
            self.outcome[name] = "not run: no time left"
            return None
        start = time.monotonic()
        log = self.out / f"{name.replace(' ', '_')}.log"
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self.environment, cwd=self.out,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=min(limit, left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = "stopped at its limit"
        seconds = time.monotonic() - start
        self.outcome[name] = f"ok, {seconds:.0f} s" if code == 0 else f"failed ({code}) after {seconds:.0f} s"
        text = log.read_text(encoding="utf-8", errors="replace")
        print(f"\n=== {name}: {self.outcome[name]}", flush=True)
        lines = [line for line in text.splitlines() if "RESULT " not in line]
        print("\n".join(lines[-tail:]) if code == 0 else cause(text), flush=True)
        return code == 0

    def python(self, module):
        return [sys.executable, "-m", module]

    def torchrun(self, module):
        processes = ["--nproc-per-node", str(self.a.processes), "--master-port", str(29600 + len(self.outcome))]
        return [sys.executable, "-m", "torch.distributed.run", *processes, "-m", module]

    def accelerate(self, module):
        config = self.out / "fsdp2.yaml"
        mixed = "no" if self.a.tiny else "bf16"
        config.write_text(
            FSDP2_YAML.format(processes=self.a.processes, mixed_precision=mixed, use_cpu=str(self.a.tiny).lower())
        )
        port = ["--main_process_port", str(29600 + len(self.outcome))]
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *port]
        return [*launch, "-m", module]


def train(session):
    """The checkpoint, then every mode on it."""
    a = session.a
    if not any(session.wants(name) for name in TRAINING):
        return {}
    module = "benchmarks.train_throughput"
    size = (
        ["--tiny", "--sequence", "64", "--batch", "2", "--dtype", "float32"] if a.tiny else ["--layers", str(a.layers)]
    )
    size += ["--checkpoint", str(session.out / "checkpoint"), "--steps", str(a.steps), "--warmup", str(a.warmup)]
    if not a.tiny:
        size += ["--liger"]
    size += ["--checkpointing"] if a.checkpointing else []
    if session.wants("checkpoint") or not (session.out / "checkpoint" / "config.json").exists():
        only, a.only = a.only, None
        session.step("checkpoint", [*session.python(module), "--make", *size], 180, tail=2)
        a.only = only
    results = session.out / "results.jsonl"
    results.unlink(missing_ok=True)
    found = {}
    for name, (launcher, extra, limit) in TRAINING.items():
        if name == "turbo selective" and not a.checkpointing:
            continue
        if a.tiny and "--storage" in extra:
            extra = [*extra[: extra.index("--storage")], "--storage", "float32"]
        profile = ["--profile", str(session.out / "breakdown.txt")] if name == "turbo fused" and not a.tiny else []
        command = [*getattr(session, launcher)(module), *extra, *size, *profile, "--out", str(results)]
        before = len(results.read_text().splitlines()) if results.exists() else 0
        limit = limit * (3 if a.layers > 8 else 1)
        if session.step(name, command, limit, tail=34 if profile else 1):
            found[name] = json.loads(results.read_text().splitlines()[before])
    return found


def one_gpu(session):
    """Whole steps in one process; the ratio of each row to plain TRL in the same work, and how far its losses are."""
    a, module, found = session.a, "benchmarks.train_throughput", {}
    results = session.out / "one_gpu.jsonl"
    results.unlink(missing_ok=True)
    tiny = ["--tiny"] if a.tiny else []
    head = [*session.python("benchmarks.lm_head"), *tiny, "--out", str(session.out / "lm_head.json")]
    session.step("lm head", head, 60, tail=5)
    scratch = Path(tempfile.mkdtemp(prefix="checkpoints_"))
    for work, extra, storage, rows in ONE_GPU:
        if a.tiny:
            extra = [*extra, "--tiny", "--sequence", "64"]
        checkpoint = scratch / f"{extra[1]}"
        size = [*extra, "--checkpoint", str(checkpoint), "--steps", str(a.steps), "--warmup", str(a.warmup)]
        size += [] if a.tiny else ["--liger"]
        if not (checkpoint / "config.json").exists():
            session.step(f"checkpoint {extra[1]}", [*session.python(module), "--make", *size], 120, tail=1)
        for row in rows:
            name = f"{work} {row}"
            command = [*session.python(module), *ONE_GPU_ROWS[row], *size, "--storage", storage, "--out", str(results)]
            if row in ("ours", "selective") and not a.tiny:
                command += ["--profile", str(session.out / f"breakdown_{name.replace(' ', '_')}.txt")]
            before = len(results.read_text().splitlines()) if results.exists() else 0
            if session.step(name, command, ONE_GPU_SECONDS.get(row, 120), tail=1):
                found[name] = json.loads(results.read_text().splitlines()[before])
    shutil.rmtree(scratch)
    lines = ["| work and row | ms/step | over trl | peak GiB | MFU | largest loss difference |", f"{'|---' * 6}|"]
    for name, r in found.items():
        peer = found.get(next(f"{work} trl" for work, *_ in ONE_GPU if name.startswith(work)))
        ratio = gap = "-"
        if peer:
            ratio = f"{r['ms_step'] / peer['ms_step']:.3f}"
            gap = f"{max(abs(p - q) for p, q in zip(r['losses'], peer['losses'], strict=True)):.4f}"
        lines.append(f"| {name} | {r['ms_step']} | {ratio} | {r['peak_gib']} | {100 * r['mfu']:.1f} % | {gap} |")
    (session.out / "one_gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n=== outcome")
    for name, text in session.outcome.items():
        print(f"{name}: {text}")
    print("\n" + "\n".join(lines))


def table(results):
    rows = ["| run | tokens/s/GPU | ms/step | peak GiB | MFU | start to first step, s |", "|---|---|---|---|---|---|"]
    for name, r in results.items():
        rows.append(
            f"| {name} | {r['tokens_s_gpu']:,} | {r['ms_step']} | {r['peak_gib']} | {100 * r['mfu']:.1f} % | "
            f"{r['start_to_first_step_s']} |"
        )
    for ours, peer in PAIRS:
        if ours in results and peer in results:
            u, v = results[ours], results[peer]
            ratio = u["tokens_s_gpu"] / v["tokens_s_gpu"]
            gap = max(abs(p - q) for p, q in zip(u["losses"], v["losses"], strict=False))
            rows.append(f"\n{ours} / {peer}: **{ratio:.2f}x**, largest loss difference {gap:.4f}")
    for name, r in results.items():
        rows.append(f"  losses {name}: {r['losses']}")
    return "\n".join(rows)


def picture(results, path):
    """Tokens a second a GPU and peak memory, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(results)
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(names) + 1.5), sharey=True)
    for axis, key, title in zip(axes, ("tokens_s_gpu", "peak_gib"), ("tokens/s/GPU", "peak GiB"), strict=True):
        values = [results[name][key] or 0 for name in names]
        colors = ["#c44" if name in ("native", "fsdp2") else "#369" for name in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, fmt="{:,.0f}" if key == "tokens_s_gpu" else "{:.1f}", padding=3)
        axis.set_title(title)
        axis.invert_yaxis()
        axis.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one-gpu", action="store_true", help="whole steps in one process on one GPU, nothing else")
    parser.add_argument("--minutes", type=float, default=8.8, help="deadline of the whole session")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", default=None, help="comma list of words: steps whose name has one of them")
    a = parser.parse_args()
    session = Session(a)
    if a.one_gpu:
        return one_gpu(session)
    tiny = ["--tiny"] if a.tiny else []
    block = [*session.python("benchmarks.moe_block"), *tiny, "--out", str(session.out / "moe_block.json")]
    session.step("moe block", block, 120)
    if not a.tiny:
        session.step("kernel sweep", session.python("benchmarks.kernel_sweep"), 90, tail=40)
    adamw = [*session.python("benchmarks.adamw"), *(tiny or ["--sweep"]), "--out", str(session.out / "adamw.json")]
    session.step("adamw kernel", adamw, 90, tail=60)
    exchange = [*session.torchrun("benchmarks.moe_exchange"), *tiny, "--out", str(session.out / "moe_exchange.json")]
    session.step("moe exchange", exchange, 120)
    files = [str(ROOT / f"tests/device/test_{name}_cuda.py") for name in ("ops", "adamw", "lm_head")]
    tests = [*session.python("pytest"), "-q", "-x", "-p", "no:cacheprovider", "--noconftest", *files]
    session.step("device tests", tests, 120, tail=6)
    results = train(session)
    print("\n=== outcome")
    for name, text in session.outcome.items():
        print(f"{name}: {text}")
    if results:
        text = table(results)
        (session.out / "table.md").write_text(text + "\n", encoding="utf-8")
        picture(results, session.out / "side_by_side.png")
        print("\n" + text)
    for name in ("moe_block", "moe_exchange"):
        log = session.out / f"{name}.log"
        if log.exists():
            print("\n" + "\n".join(log.read_text(encoding="utf-8").splitlines()[-7:]))


if __name__ == "__main__":
    main()
