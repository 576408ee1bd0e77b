"""Version floors, optional packages, and that what is said about the installed torch is true of it."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
from packaging.version import Version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hf_fsdpturbo import compat

REPOSITORY = Path(__file__).resolve().parents[2]


def on_torch(monkeypatch, major, minor):
    monkeypatch.setattr(compat, "torch_release", lambda: (major, minor))


def test_what_is_said_about_the_installed_torch_is_true():
    assert callable(getattr(FSDPModule, compat.gradient_divide_factor_method()))
    names = {
        "set_force_sum_reduction_for_comms": compat.has_force_sum_reduction(),
    }
    for name, said in names.items():
        assert hasattr(FSDPModule, name) == said, name
    assert hasattr(DeviceMesh, "_concatenate") == compat.has_mesh_concatenate()
    if compat.grouped_mm_path() is not None:
        assert callable(compat.grouped_mm())


# Read in the released wheels 2.7.1, 2.8.0, 2.9.1, 2.10.0 and 2.13.0; of 2.12.0 only the FSDPModule methods.
@pytest.mark.parametrize(
    ("minor", "method", "force_sum", "concatenate", "grouped", "on_cpu"),
    [
        (7, "set_reduce_scatter_divide_factor", False, False, None, False),
        (8, "set_gradient_divide_factor", True, False, "torch._grouped_mm", False),
        (9, "set_gradient_divide_factor", True, False, "torch._grouped_mm", True),
        (10, "set_gradient_divide_factor", True, True, "torch.nn.functional.grouped_mm", True),
        (12, "set_gradient_divide_factor", True, True, "torch.nn.functional.grouped_mm", True),
        (13, "set_gradient_divide_factor", True, True, "torch.nn.functional.grouped_mm", True),
    ],
)
def test_torch_releases(monkeypatch, minor, method, force_sum, concatenate, grouped, on_cpu):
    on_torch(monkeypatch, 2, minor)
    assert compat.gradient_divide_factor_method() == method
    assert compat.has_force_sum_reduction() is force_sum
    assert compat.has_mesh_concatenate() is concatenate
    assert compat.grouped_mm_path() == grouped
    assert compat.has_cpu_grouped_mm() is on_cpu


def test_no_grouped_mm_is_an_error(monkeypatch):
    on_torch(monkeypatch, 2, 7)
    with pytest.raises(ValueError, match="grouped_mm needs torch>=2.8"):
        compat.grouped_mm()


def test_what_torch_2_7_gets_wrong_is_refused(monkeypatch):
    on_torch(monkeypatch, 2, 7)
    compat.refuse_broken_torch(1, "gloo", 1, 1)
    compat.refuse_broken_torch(4, "nccl", 2, 1)
    compat.refuse_broken_torch(4, "hccl", 1, 4)
    with pytest.raises(ValueError, match="'cpu:gloo,cuda:nccl'.*4"):
        compat.refuse_broken_torch(4, "cpu:gloo,cuda:nccl", 1, 1)
    with pytest.raises(ValueError, match="cp_size=2 with ep_size=4"):
        compat.refuse_broken_torch(8, "hccl", 2, 4)
    on_torch(monkeypatch, 2, 8)
    compat.refuse_broken_torch(8, "gloo", 2, 4)
    with pytest.raises(ValueError, match="edp_size=2.*cp_size=2"):
        compat.refuse_broken_torch(8, "nccl", 2, 2, edp_size=2)
    on_torch(monkeypatch, 2, 10)
    compat.refuse_broken_torch(8, "gloo", 2, 2, edp_size=2)


@pytest.mark.parametrize(
    ("package", "version", "fine"),
    [
        ("torch", "2.7.1", True),
        ("torch", "2.6.0", False),
        ("torch", "2.10.0a0+vendor", True),
        ("torch", "2.13.0+cpu", True),
        ("transformers", "5.24.0", True),
        ("transformers", "5.23.9", False),
        ("transformers", "6.0.0", False),
        ("trl", "1.16.0", True),
        ("trl", "2.0.0", False),
        ("accelerate", "1.14.9", False),
    ],
)
def test_floors(package, version, fine):
    problem = compat.floor_problem(package, Version(version))
    if fine:
        assert problem is None
    else:
        assert problem is not None
        assert version in problem
        assert f"pip install '{package}>=" in problem


def test_floors_are_checked_together(monkeypatch):
    compat.check_floors(compat.FLOORS)
    monkeypatch.setattr(compat, "installed_version", lambda name: None if name == "trl" else Version("1.0"))
    with pytest.raises(ValueError, match="torch 1.0 is installed.*trl is not installed"):
        compat.check_floors(("torch", "trl"))


def test_a_package_without_metadata_is_asked_itself(monkeypatch):
    module = types.ModuleType("carried_package")
    module.__version__ = "3.4"
    monkeypatch.setitem(sys.modules, "carried_package", module)
    compat.installed_version.cache_clear()
    assert compat.installed_version("carried-package") == Version("3.4")
    assert compat.installed_version("surely-absent-package") is None
    compat.installed_version.cache_clear()


@pytest.mark.parametrize("module", sorted(compat.OPTIONAL))
def test_a_missing_optional_package_names_setting_and_command(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert not compat.is_available(module)
    for kind in (ImportError, ValueError):
        with pytest.raises(kind, match="kernel_config name 'x' needs .*pip install"):
            compat.require(module, "kernel_config name 'x'")
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    compat.require(module, "kernel_config name 'x'")


@pytest.mark.skipif(sys.platform != "linux", reason="slows gloo's threads through Linux scheduling")
def test_a_process_that_ends_right_after_a_collective_does_not_abort():
    command = [sys.executable, "-m", "tests.support.gloo_exit", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert ran.returncode == 0, ran.stderr[-2000:]
    without, with_it = map(int, ran.stdout.split()[-2:])
    assert without < 8, "torch no longer aborts here: let_gloo_finish_at_exit may go"
    assert with_it == 8


@pytest.mark.parametrize("release", [(2, 11), (2, 13)])
def test_axes_out_of_order_are_not_merged_on_torch_2_11(monkeypatch, release):
    """The stand-in raises as torch 2.11 does; on another release nothing is replaced."""
    redistribute = pytest.importorskip("torch.distributed.tensor._redistribute")

    def raises(mesh, mesh_dims):
        raise KeyError("Mesh dim indices should be in ascending order.")

    monkeypatch.setattr(redistribute, "_get_flattened_mesh_by_layout", raises)
    monkeypatch.setattr(compat, "torch_release", lambda: release)
    compat.let_redistribute_keep_axes_apart.cache_clear()
    compat.let_redistribute_keep_axes_apart()
    compat.let_redistribute_keep_axes_apart.cache_clear()
    if release == (2, 11):
        assert redistribute._get_flattened_mesh_by_layout(None, (0, 1)) is None
    else:
        with pytest.raises(KeyError):
            redistribute._get_flattened_mesh_by_layout(None, (0, 1))
