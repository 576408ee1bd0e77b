"""Values and pieces of text that no setting should have, or that only some may."""

from __future__ import annotations

from typing import Any

EVIL: list[Any] = [
    None, -1, 0, 3, 7, 10**9, 10**30, 1.5, 1e30, float("nan"), float("inf"), "", " ", "0", "2", "010", "1_0", "auto",
    "x" * 5000, "a\0b", "a\ud800", "../..", "/", [], [1], {}, {"a": 1}, {"ep_size": 3}, True, False, "{", "[" * 2000,
    "{\"ep_size\": 2, \"ep_size\": 1}", "(", "*", b"x",
]  # fmt: skip
SETTINGS = (
    "ep_size", "ep_dispatcher", "dp_size", "cp_size", "cp_mode", "mp_replicate_size", "mp_shard_size", "dist_timeout",
    "ranks_per_node", "kernel_config", "init_config", "dist_config", "drop_unused_tensors", "check_loading",
    "save_quantized",
)  # fmt: skip
DIST = (
    "name", "reshard_after_forward", "offload_params", "pin_memory", "dcp_path", "ep_size", "ep_dispatcher", "zz",
    "fsdp_ignored_modules", "hook_modules", "fsdp_implementation", "efsdp_size", "ep_backend", "param_storage_dtype",
)  # fmt: skip
YAML_PARTS = (
    "ep_size: 2", "ep_size: 010", "a: &a [1, 2]", "b: *a", "c: &c [*c]", "a: 1", "? [x]\n: y", "k: !!bool maybe",
    "n: " + "9" * 5000, "d: " + "[" * 300, "t: 1:30", "\tx: 1", "s: 'x", "- 1", "e: {x: {y: 1}}", "x: \x07", "u: 1_0",
    "p: !!python/name:os.system", "---", "m: {<<: *a}", "f: .nan", "z: 1e999", "l: " + "x" * 3000,
)  # fmt: skip
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"
IN_ACCELERATE = (
    "fsdp_config: []", "fsdp_config: {1: 2}", "dynamo_config: x", "mixed_precision: [bf16]", "use_cpu: 1", "zz: 1",
    "fsdp_config: {fsdp_turbo_ep_size: 010}", "num_machines: x", "main_process_port: 1:30", "debug: true",
)  # fmt: skip
