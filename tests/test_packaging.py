"""What is released: the source distribution holds the project, the images' own script installs it as the cpu image does, and what is installed
works without the clone. Also what the gpu image pins, which no machine without a GPU can install.

Run: pytest tests/test_packaging.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron_elastic
from megatron_elastic.packages import COSTS
from tests.test_project import PINS, PROJECT, ROOT, project_files, read_pins

INSTALL = Path("docker") / "install.sh"
GPU = ROOT / "requirements" / "gpu.txt"


def alone(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command that finds nothing of this clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    return subprocess.run([*map(str, command)], env=environment, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is, or would be, committed."""
    clone = tmp_path_factory.mktemp("clone")
    for path in project_files():
        target = clone / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return clone


@pytest.fixture(scope="module")
def sources(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution of `clone`."""
    dist = tmp_path_factory.mktemp("dist")
    built = alone(sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(dist)!r})", cwd=clone)
    assert built.returncode == 0, built.stderr
    (archive,) = dist.iterdir()
    assert archive.name == f"megatron_elastic-{megatron_elastic.__version__}.tar.gz"
    with tarfile.open(archive) as packed:
        packed.extractall(dist, filter="data")
    return dist / archive.name.removesuffix(".tar.gz")


def files_in(directory: Path) -> set[str]:
    """Every file below a directory, but for what a build writes beside the sources."""
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith("megatron_elastic.egg-info/")}


def test_the_source_distribution_holds_the_project(sources: Path, clone: Path) -> None:
    left_out = {name for name in files_in(clone) - files_in(sources) if not name.startswith((".ci/", ".github/"))}
    assert left_out == {".gitignore"}
    assert files_in(sources) - files_in(clone) == {"PKG-INFO", "setup.cfg"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the images' Python is 3.12")
def test_the_cpu_image_is_installed_and_works(sources: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    done = alone(sources / INSTALL, "cpu", prefix)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("missing")] == ["ok"] * 4, "torch, megatron-core, and the step"
    assert all(f"missing   {name}: {COSTS[name]}" in lines for name in COSTS if name != "megatron-core")
    assert not (sources / "build").exists(), "what a build leaves would be packed into the next one"

    program, python = prefix / "bin" / "megatron-elastic", prefix / "bin" / "python"
    assert alone(program, "--version", cwd=tmp_path).stdout.startswith(f"megatron-elastic {megatron_elastic.__version__}\n")
    where = "import importlib.resources as r; root = r.files('megatron_elastic'); print(root)"
    files = f"{where}; print(all((root / name).is_file() for name in ('py.typed', 'report/page.html.jinja')))"
    package, complete = alone(python, "-c", files, cwd=tmp_path).stdout.splitlines()
    assert Path(package).is_relative_to(prefix) and complete == "True"

    shared = prefix / "share" / "megatron-elastic" / "recipes"
    assert {str(path.relative_to(shared)) for path in shared.rglob("*.yaml")} == {
        str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml")
    }
    miniature = [f"@{shared / 'miniature' / name}.yaml" for name in ("laptop", "llama31_8b")]
    planned = alone(program, "validate", shared / "llama31_8b.yaml", *miniature, cwd=tmp_path)
    assert planned.returncode == 0 and planned.stdout.startswith("ok: "), planned.stderr

    again = alone(sources / INSTALL, "cpu", prefix)
    assert again.returncode == 2 and "is there already; remove it or choose another PREFIX" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: docker/install.sh cpu|gpu PREFIX"),
        (("cpu",), "usage: docker/install.sh cpu|gpu PREFIX"),
        (("tpu", "venv"), "target 'tpu' is not cpu or gpu"),
        pytest.param(
            ("gpu", "venv"),
            "the GPU image needs Python 3.12",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="on the image's Python it would go on"),
        ),
    ],
)
def test_the_script_refuses_what_it_cannot_do(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = alone(ROOT / INSTALL, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_gpu_image_pins_every_optional_package_exactly() -> None:
    text = GPU.read_text(encoding="utf-8")
    (apex,) = re.findall(r"^apex @ git\+https://github\.com/NVIDIA/apex@[0-9a-f]{40}$", text, flags=re.MULTILINE)
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#") and line != apex]
    pins = {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in lines}
    assert len(pins) == len(lines) and all(str(line.specifier).startswith("==") for line in lines)
    assert set(COSTS) == {"apex", *(name for name in COSTS if name in pins)}
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for extra in ("te", "mamba", "modelopt", "deepspeed") for line in extras[extra]]
    assert len(wanted) == 5
    assert [str(line) for line in wanted if not line.specifier.contains(pins[canonicalize_name(line.name)])] == []
    parts = {pins[name] for name in ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")}
    assert len(parts) == 1, "its three packages are one release"
    python = read_pins(PINS["3.12"])
    assert {name for name in pins.keys() & python.keys() if pins[name] != python[name]} == set()
    assert not {"torch", "triton", "numpy"} & pins.keys(), "these stay the base image's"


def test_images_run_as_an_ordinary_user_from_a_tag_that_can_be_chosen() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (\S+) AS (\w+)$", text, flags=re.MULTILINE) == [
        ("python:${PYTHON_TAG}", "cpu"),
        ("nvcr.io/nvidia/pytorch:${NGC_TAG}", "gpu"),
    ]
    assert len(re.findall(r"^ARG (?:NGC|PYTHON)_TAG=\S+$", text, flags=re.MULTILINE)) == 2
    for stage in text.split("\nFROM ")[1:]:
        assert re.search(r"^USER [1-9]\d*$", stage, flags=re.MULTILINE)
        assert stage.index("docker/install.sh") < stage.index("USER ")


def test_the_citation_names_this_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == megatron_elastic.__version__ and citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors"} <= citation.keys()
    assert all(paper["url"].startswith("https://arxiv.org/abs/") and paper["title"] for paper in citation["references"])


def load_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_image", ROOT / "docker" / "check_image.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its own module
    spec.loader.exec_module(module)
    return module


def test_the_check_says_what_is_wrong_with_each_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check = load_check()
    installed = {"torch": "2.10.0a0+nv", "megatron-core": "0.19.2", "transformer-engine": "2.9.0", "apex": "0.1", "mamba-ssm": "2.3.1+cu13"}
    monkeypatch.setattr(check, "version_of", installed.get)
    monkeypatch.setattr(check, "pins", lambda target: {"megatron-core": "0.19.2", "transformer-engine": "2.20.2", "mamba-ssm": "2.3.1"})
    monkeypatch.setattr(check, "import_error", lambda module: "OSError: libcuda.so" if module == "mamba_ssm" else "")
    found = {line.what.partition(" ")[0].rstrip(":"): line for line in check.packages("gpu", imports=True)}
    assert {name: line.verdict for name, line in found.items() if line.verdict != "missing"} == {
        **{"torch": "ok", "megatron-core": "ok", "transformer-engine": "differs", "apex": "ok", "mamba-ssm": "broken"}
    }
    assert found["transformer-engine"].what == "transformer-engine 2.9.0, pinned 2.20.2"
    assert found["mamba-ssm"].what == "mamba-ssm 2.3.1+cu13: OSError: libcuda.so"
    assert found["deepspeed"].what == f"deepspeed: {COSTS['deepspeed']}"
    assert [name for name, line in found.items() if not line.failed] == ["torch", "megatron-core", "apex"]
    assert not any(
        line.failed for line in check.packages("cpu", imports=False) if line.what.split()[0].rstrip(":") not in check.PROMISED["cpu"]
    )
    assert set(check.MODULES) == set(COSTS)


@pytest.mark.parametrize(
    ("target", "names"), [("cpu", {"torch", "megatron-core"}), ("gpu", {"megatron-core", "transformer-engine", "mamba-ssm"})]
)
def test_the_check_knows_the_pins(target: str, names: set[str]) -> None:
    pins = load_check().pins(target)
    assert names <= pins.keys()
    assert ("torch" in pins) == (target == "cpu"), "the gpu image's torch is the base's"


@pytest.mark.parametrize("arguments", [[], ["tpu"], ["cpu", "gpu"]])
def test_the_check_wants_a_target(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert load_check().main(arguments) == 2
    assert capsys.readouterr().err == "usage: check_image.py cpu|gpu\n"
