"""Device operators of the dispatchers: one file a device (torch.py, triton.py, npu.py) behind ``table.py``.

Functions there are plain: no autograd. ``functional.py`` has the operators with gradients, ``expert_mlp.py`` the whole
expert block that keeps few activations.
"""
