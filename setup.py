"""Adds the compiled C kernels to a wheel; pyproject.toml says everything else.

They are shared libraries that Python loads with ctypes: the wheel is for one platform, and for every version
of Python on it. Without a compiler it is for every platform, and its kernels are compiled at first use.
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

PACKAGE = "loco/kernels/cpu"


def load_build() -> ModuleType:
    """kernels/cpu/build.py, without its package: that needs torch."""
    spec = importlib.util.spec_from_file_location("build", Path(__file__).parent / "kernels/cpu/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WheelWithKernels(bdist_wheel):
    def run(self) -> None:
        build = load_build()
        packed = Path(self.get_finalized_command("build_py").build_lib, PACKAGE)
        for old in packed.glob("*.so"):  # of an earlier run in this folder
            old.unlink()
        packed.mkdir(parents=True, exist_ok=True)
        try:
            compiler = build.find_compiler()
            with tempfile.TemporaryDirectory() as folder:
                for name in build.builds_for_this_machine():
                    extra = build.BUILDS[name]
                    build.compile_library(compiler, extra, Path(folder, build.library_name(extra)))
                for made in Path(folder).glob("*.so"):
                    shutil.copy(made, packed)
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # which `install` asks for the same
        except build.BuildError as error:
            self.warn(f"the wheel has no compiled kernels: {error}")
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"bdist_wheel": WheelWithKernels})
