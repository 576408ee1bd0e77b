"""Puts the launch files, recipes and pages, which lie at the top of a clone, into the package that is built."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {
    "accelerate_configs": ("*.yaml",),
    "recipes": ("*.py", "*.yaml"),
    "docs": ("*.md", "*.svg", "*.png", "*.ipynb"),
}


class BuildWithShipped(build_py):
    """As always, and `hf_fsdpturbo/shipped/` (see hf_fsdpturbo/shipped.py); an editable install reads the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "hf_fsdpturbo", "shipped")
        shutil.rmtree(target, ignore_errors=True)
        for folder, patterns in SHIPPED.items():
            for source in sorted(path for pattern in patterns for path in Path(folder).rglob(pattern)):
                if "__pycache__" not in source.parts:
                    self.mkpath(str((target / source).parent))
                    shutil.copyfile(source, target / source)


setup(cmdclass={"build_py": BuildWithShipped})
