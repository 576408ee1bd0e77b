"""Version floors, optional packages, and what differs between torch releases: each with the version that ends it.

Nothing here imports torch: versions are read from package metadata, so that importing the package stays cheap.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from packaging.version import Version

# package -> (lowest version, first version that is too new or None)
FLOORS: dict[str, tuple[str, str | None]] = {
    "torch": ("2.7", None),
    "transformers": ("5.24", "6"),
    "trl": ("1.16", "2"),
    "accelerate": ("1.15", "2"),
}

# import name -> (distribution name, how to install it)
OPTIONAL: dict[str, tuple[str, str]] = {
    "peft": ("peft", "pip install 'hf_fsdpturbo[peft]'"),
    "bitsandbytes": ("bitsandbytes", "pip install 'hf_fsdpturbo[qlora]'"),
    "liger_kernel": ("liger-kernel", "pip install 'hf_fsdpturbo[liger]'"),
    "fla": ("flash-linear-attention", "pip install 'hf_fsdpturbo[fla]'"),
    "torch_npu": ("torch-npu", "pip install 'hf_fsdpturbo[npu]' (the release that matches torch and CANN)"),
    "fsdp_turbo": ("fsdp-turbo", "pip install --no-deps -r requirements/fsdpturbo.txt"),
    "triton": ("triton", "pip install triton (CUDA wheels of torch bring it along)"),
    "quack": ("quack-kernels", "pip install 'hf_fsdpturbo[quack]'"),
    "matplotlib": ("matplotlib", "pip install 'hf_fsdpturbo[demo]'"),
}


class MissingDependencyError(ImportError, ValueError):
    """An optional package is needed by a setting and is not installed. Also a ValueError: a setting asked for it."""


@cache
def installed_version(distribution: str) -> Version | None:
    """Version of an installed distribution, or None.

    Read from package metadata. A package on the path without metadata (a source tree carried to another machine) is
    imported and asked for its ``__version__``.
    """
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        module = distribution.replace("-", "_")
        if not is_available(module):
            return None
        text = getattr(importlib.import_module(module), "__version__", None)
        return Version(text) if text else None


def is_available(module: str) -> bool:
    """Whether ``import module`` would find something. It is not imported: a found package may still fail to load."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def require(module: str, needed_for: str) -> None:
    """Raise unless an optional package is installed.

    Args:
        module: import name, a key of :data:`OPTIONAL`.
        needed_for: the setting that asked for it, with its value, e.g. ``"kernel_config name 'liger'"``.

    Raises:
        MissingDependencyError: (an ImportError and a ValueError) naming the setting and the command that installs it.
    """
    distribution, install = OPTIONAL[module]
    if not is_available(module):
        raise MissingDependencyError(
            f"{needed_for} needs {distribution}, which is not installed. Install it: {install}"
        )


def floor_problem(package: str, version: Version | None) -> str | None:
    """One sentence when ``version`` of ``package`` is outside :data:`FLOORS`, else None. Missing counts as outside."""
    low, below = FLOORS[package]
    wanted = f"{package}>={low}" + (f",<{below}" if below else "")
    if version is None:
        return f"{package} is not installed; hf_fsdpturbo needs {wanted}. Install it: pip install '{wanted}'"
    release = version.release  # a vendor's 2.10.0a0+build counts as 2.10
    if release < Version(low).release or (below is not None and release >= Version(below).release):
        return f"{package} {version} is installed; hf_fsdpturbo needs {wanted}. Change it: pip install '{wanted}'"
    return None


def check_floors(packages: Iterable[str] = ("torch", "transformers", "accelerate")) -> None:
    """Raise ValueError naming every package of ``packages`` whose installed version is outside its floor."""
    problems = [problem for name in packages if (problem := floor_problem(name, installed_version(name)))]
    if problems:
        raise ValueError(" ".join(problems))


def torch_release() -> tuple[int, int]:
    """(major, minor) of the installed torch; local and pre-release parts dropped.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    version = installed_version("torch")
    if version is None:
        raise MissingDependencyError(
            "hf_fsdpturbo needs torch>=2.7, which is not installed. Install it: pip install torch"
        )
    return version.major, version.minor


def gradient_divide_factor_method() -> str:
    """Name of the FSDPModule method that sets the gradient divide factor. Goes when the floor is torch 2.8."""
    return "set_gradient_divide_factor" if torch_release() >= (2, 8) else "set_reduce_scatter_divide_factor"


def has_force_sum_reduction() -> bool:
    """Whether FSDPModule has ``set_force_sum_reduction_for_comms``. Goes when the floor is torch 2.8."""
    return torch_release() >= (2, 8)


def has_wide_addmm() -> bool:
    """Whether ``torch.addmm`` takes ``out_dtype`` (CUDA). Goes when the floor is torch 2.8."""
    return torch_release() >= (2, 8)


def has_mesh_concatenate() -> bool:
    """Whether DeviceMesh has ``_concatenate``; the mesh for edp > 1 with cp > 1 needs it. Goes at floor 2.10."""
    return torch_release() >= (2, 10)


def has_cpu_grouped_mm() -> bool:
    """Whether torch's grouped matmul runs on CPU, and elsewhere through its composite kernel. Goes at floor 2.9."""
    return torch_release() >= (2, 9)


def grouped_mm_path() -> str | None:
    """Where torch keeps its grouped matmul, or None where it has none. Goes when the floor is torch 2.10."""
    if torch_release() >= (2, 10):
        return "torch.nn.functional.grouped_mm"
    return "torch._grouped_mm" if torch_release() >= (2, 8) else None


def grouped_mm() -> Callable[..., Any]:
    """torch's grouped matmul ``f(x [S, K], w [G, K, N], offs=[G] int32) -> [S, N]``.

    Raises:
        ValueError: this torch has none.
    """
    path = grouped_mm_path()
    if path is None:
        raise ValueError(
            f"grouped_mm needs torch>=2.8 (torch.nn.functional.grouped_mm since 2.10), but torch is "
            f"{installed_version('torch')}. Use ep_dispatcher='eager', or install a newer torch."
        )
    owner, name = path.rsplit(".", 1)
    function: Callable[..., Any] = getattr(importlib.import_module(owner), name)
    return function


def refuse_broken_torch(world_size: int, backend: str, cp_size: int, ep_size: int, edp_size: int = 1) -> None:
    """Refuse by name what is known to be wrong on old torch releases (2.7 is the published A3 environment).

    Args:
        world_size: number of processes; one process is always fine.
        backend: name of the default process group's backend, ``torch.distributed.get_backend()``.
        cp_size, ep_size, edp_size: the run's sizes.

    Raises:
        ValueError: on torch 2.7, FSDP2 over gloo (it sums gradients instead of averaging them) or cp_size and ep_size
            both above 1 (building that mesh raises KeyError); before 2.10, edp_size and cp_size both above 1.
    """
    if world_size == 1 or torch_release() >= (2, 10):
        return
    version, old = installed_version("torch"), torch_release() < (2, 8)
    if old and "gloo" in backend:
        raise ValueError(
            f"FSDP2 over backend {backend!r} on torch {version} does not divide gradients: they come out world_size "
            f"({world_size}) times too large. Install torch>=2.8, or train on an accelerator."
        )
    if old and cp_size > 1 and ep_size > 1:
        raise ValueError(
            f"cp_size={cp_size} with ep_size={ep_size} cannot build its mesh on torch {version} (DeviceMesh raises "
            "KeyError). Install torch>=2.8, or set one of the two to 1."
        )
    if not has_mesh_concatenate() and cp_size > 1 and edp_size > 1:
        raise ValueError(
            f"edp_size={edp_size} (dp / (ep * efsdp)) with cp_size={cp_size} cannot build its mesh on torch "
            f"{version}. Install torch>=2.10, or leave efsdp_size out so that edp is 1."
        )


# Note [Leaving gloo]
# A worker thread of a gloo group may hold the last reference to a tensor of a collective that is already over, and
# needs the interpreter's lock to drop it. A process that goes from its last collective straight to its end shuts the
# interpreter down first; Python then ends the waiting thread inside a C++ destructor, and C++ answers with abort():
# "terminate called without an active exception", exit code -6, after the model was saved. Destroying the group does
# not help while a mesh or an FSDP unit still holds it. Sleeping gives the lock away; the workers need microseconds.
GLOO_LAST_WORDS = 0.2  # seconds


@cache
def let_gloo_finish_at_exit() -> None:
    """At this process's exit, let gloo's worker threads drop their last tensors: see Note [Leaving gloo].

    Goes when torch joins or drains these threads at exit by itself (pytorch#179291, not there in 2.13).
    """
    atexit.register(time.sleep, GLOO_LAST_WORDS)


# Note [Axes out of order]
# Experts lie over (efsdp_expert_cp, ep), and ranks of one ep group stand between those of one efsdp_expert_cp group:
# the two axes are not in the order of ranks. torch 2.11 asks for the mesh that would merge their all-gathers, and its
# layout arithmetic raises KeyError instead of finding none: `full_tensor()` of an expert parameter fails at cp > 1.
@cache
def let_redistribute_keep_axes_apart() -> None:
    """On torch 2.11, let gathers over axes that no mesh can merge go one by one: see Note [Axes out of order].

    Goes when the floor is torch 2.12. Nothing is changed on other releases.
    """
    if torch_release() != (2, 11):
        return
    redistribute: Any = importlib.import_module("torch.distributed.tensor._redistribute")
    own = redistribute._get_flattened_mesh_by_layout

    def find(mesh: Any, mesh_dims: tuple[int, ...]) -> Any:
        try:
            return own(mesh, mesh_dims)
        except KeyError:  # torch's own answer to axes that are not in order
            return None

    redistribute._get_flattened_mesh_by_layout = find
