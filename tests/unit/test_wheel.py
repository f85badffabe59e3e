"""What a wheel installs: `loco` and `loco.kernels`, nothing else; and the C kernels, compiled."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from selection import COMMANDS

from loco.kernels.cpu import BuildError, build

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path, **environment: str) -> Path:
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "loco", "kernels"):
        # Copied, so that the build leaves nothing behind here.
        subprocess.run(["cp", "-a", str(ROOT / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "-w", str(folder), str(source)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("pulseloco-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, built from this checkout without a compiler, and what it installs in `site`."""
    folder = tmp_path_factory.mktemp("wheel")
    built = build_wheel(folder, CC="none")
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder


def run_installed(wheel: Path, program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with what the wheel installs, from an empty folder, without this checkout on the path."""
    return subprocess.run(
        [sys.executable, "-c", program, str(wheel / "site")],
        cwd=tmp_path,
        # Writing no bytecode: other tests look at what was installed, in any order.
        env={
            "PYTHONPATH": str(wheel / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )


def test_a_built_wheel_installs_loco_with_all_its_modules_and_nothing_else(wheel: Path) -> None:
    names = [str(path.relative_to(wheel / "site")) for path in (wheel / "site").rglob("*") if path.is_file()]
    sources = {
        f"loco/{path.relative_to(ROOT / 'loco')}"
        for path in (ROOT / "loco").glob("**/*.py")
        if "kernels" not in path.relative_to(ROOT / "loco").parts
    } | {
        f"loco/kernels/{path.relative_to(ROOT / 'kernels')}"
        for path in (ROOT / "kernels").rglob("*")
        if path.suffix in (".py", ".c", ".h")
    }
    assert len(sources) > 50
    assert {name for name in names if "dist-info" not in name} == sources | {"loco/py.typed"}


@pytest.mark.check(COMMANDS)
def test_the_package_asks_for_torch_and_numpy_and_leaves_the_rest_to_extras(wheel: Path) -> None:
    (found,) = (wheel / "site").glob("*.dist-info/METADATA")
    metadata = email.message_from_string(found.read_text())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    required = metadata.get_all("Requires-Dist") or []
    always = [one for one in required if "extra ==" not in one]
    assert always == ["torch>=2.11", "numpy>=2.3", "fsspec>=2024.12"]  # the last is torch's own, too
    assert {"gpu", "experiments", "elastic", "gym", "pipeline", "huggingface", "parquet", "dev"} == set(
        metadata.get_all("Provides-Extra") or []
    )


@pytest.mark.check(COMMANDS)
def test_an_installed_wheel_leaves_the_name_kernels_to_others(wheel: Path, tmp_path: Path) -> None:
    program = (
        "import sys, loco, loco.kernels, torch\n"
        "assert loco.kernels.digest(torch.zeros(1)) == 0\n"
        "assert loco.__file__.startswith(sys.argv[1]), loco.__file__\n"
        "assert loco.kernels.__file__.startswith(sys.argv[1])\n"
        "try:\n    import kernels\n"
        "except ImportError:\n    print('no top-level kernels')\n"
    )
    done = run_installed(wheel, program, tmp_path)
    assert done.stdout.strip() == "no top-level kernels", done.stderr


WITHOUT_EXTRAS = """
import os, sys, warnings
for name in ("triton", "omegaconf", "matplotlib", "tqdm", "tensorboard", "transformers", "torchft"):
    sys.modules[name] = None  # importing it fails, as if it were not installed
import torch, loco, loco.kernels

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
param = torch.nn.Parameter(torch.ones(1003))
optimizer = loco.PulseLoCo(torch.optim.AdamW([param], lr=1e-3), sync_every=1)
param.sum().backward()
optimizer.step()
checkpoints = loco.Checkpoints("checkpoints")
checkpoints.save(optimizer, {"step": 1}, blocking=True)
assert checkpoints.load(optimizer).extra == {"step": 1}
checkpoints.close()
print(optimizer.last_report.entries)

with warnings.catch_warnings(record=True) as warned:
    assert loco.kernels.home("cuda") is loco.kernels.reference
print(warned[0].message)
try:
    loco.Sites(2, site="a", lighthouse="http://127.0.0.1:1")
except ImportError as error:
    print(error)
"""


@pytest.mark.check(COMMANDS)
def test_without_the_extras_all_works_but_what_names_its_extra(wheel: Path, tmp_path: Path) -> None:
    done = run_installed(wheel, WITHOUT_EXTRAS, tmp_path)
    assert done.returncode == 0, done.stderr
    entries, kernels, elastic = done.stdout.splitlines()
    assert entries == "1003"
    assert "the kernels for GPUs need triton, loco's extra `gpu` (" in kernels
    assert kernels.endswith("): pip install 'triton>=3.6'")
    assert elastic.startswith("a lighthouse needs torchft, loco's extra `elastic` (")


@pytest.mark.check(COMMANDS)
def test_in_an_environment_without_a_compiler_the_wheel_runs_its_own_c_kernels(tmp_path: Path) -> None:
    """By the test of cibuildwheel's recipe, whose CC names no compiler: a library that did not come with the
    wheel is an error there, and so is the warning of the reference."""
    try:
        build.find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    built = build_wheel(tmp_path)
    assert re.fullmatch(r"pulseloco-[\d.]+-py3-none-linux_\w+\.whl", built.name)
    environment, home, here = (tmp_path / name for name in ("environment", "home", "here"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    # torch and what it needs, but no checkout: .pth files in a folder that a .pth file names are not read.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--ignore-installed", str(built)], check=True)

    recipe = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    home.mkdir()
    for source in recipe["test-sources"]:
        (here / source).parent.mkdir(parents=True)
        shutil.copy(ROOT / source, here / source)
    done = subprocess.run(
        [shutil.which("sh") or "sh", "-c", " && ".join([*recipe["test-command"], "pulseloco --help"])],
        cwd=here,
        env={**recipe["test-environment"], "PATH": str(environment / "bin"), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d+): loss", done.stdout, re.MULTILINE) == ["40", "80", "120", "160"]
    assert "usage: python -m loco COMMAND" in done.stdout
    assert not list(home.rglob("*.so"))
