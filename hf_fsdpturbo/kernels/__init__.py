"""Kernels: functions and forwards that compute the same, faster, put into a model before it is sharded.

    apply.py              the table of kernel sets, and the one call that puts them in
    accelerator_set.py    what ``auto`` means on each accelerator
    elementwise.py        norms, rotary embedding, SwiGLU; liger.py and npu_elementwise.py have the operators
    linear_attention.py   which gated delta rule runs: fla.py or gated_delta_rule.py
    rebinding.py          the only place that rebinds a modeling file's globals
"""
