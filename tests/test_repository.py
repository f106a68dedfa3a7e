"""The repository itself: packaging, the lock file, the Docker image, the scripts."""

import ast
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

import east
from east.choices import DISTRIBUTION
from tests.tracked import exported

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = sorted((ROOT / "east").rglob("*.py"))
# Import name -> distribution, if they differ.
DISTRIBUTIONS = {"PIL": "pillow", "hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "pyyaml"}
RUNTIME_EXTRAS = set(EXTRAS) - {"dev", "docs", "all"}
LOCKED = re.compile(r"^([a-z0-9-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def normal(requirement: str) -> str:
    """The distribution that a requirement names, normalised as on the package index."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that an installation with these extras requires."""
    return {normal(item) for item in [*PROJECT["dependencies"], *(item for name in extras for item in EXTRAS[name])]}


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Distributions that these statements import, except this one and the standard library."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    modules = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"east"}
    return {normal(DISTRIBUTIONS.get(module, module)) for module in modules}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_is_declared(path):
    tree = ast.parse(path.read_text())
    assert imported(tree.body) <= declared(), "an import at the top of a file needs no extra"
    assert imported(ast.walk(tree)) <= declared(*RUNTIME_EXTRAS)


def test_the_distribution_has_one_name():
    assert PROJECT["name"] == DISTRIBUTION
    own = [item for items in EXTRAS.values() for item in items if item.startswith(DISTRIBUTION)]
    assert {extra for item in own for extra in re.search(r"\[(.+)\]", item).group(1).split(",")} <= set(EXTRAS)
    everything = re.search(r"\[(.+)\]", EXTRAS["all"][0]).group(1).split(",")
    assert set(everything) == set(EXTRAS) - {"all"}


def test_install_hints_name_extras():
    calls = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    hints = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "install_hint"]
    named = {argument.value for argument in hints if isinstance(argument, ast.Constant)}
    assert named
    assert named <= set(EXTRAS)


STRANGER = re.compile(r"pip install ['\"]?east\b(?!-)|['\"]east\[")  # on the package index, east is another project


@pytest.mark.parametrize(
    "text", ["pip install east", "pip install 'east[ray]'", "get 'east[ray]'", 'pip install "east"']
)
def test_the_pattern_finds_installs_of_the_other_east(text):
    assert STRANGER.search(text)


def test_no_text_says_to_install_the_other_east():
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile", "pyproject.toml")]
    for folder, pattern in (("docs", "*"), ("conf", "*.yaml"), ("east", "*"), ("scripts", "*"), ("results", "*.md"),
                            (".github", "*")):  # fmt: skip
        files += [path for path in sorted((ROOT / folder).rglob(pattern)) if path.is_file()]
    texts = [path for path in files if path.suffix not in (".pyc", ".png", ".svg", ".jpg", ".gif", ".ico", ".woff2")]
    offending = [str(path.relative_to(ROOT)) for path in texts if STRANGER.search(path.read_text())]
    assert not offending


def test_the_version_is_stated_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"## {east.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    [file] = folder.glob("*.whl")
    return file


def test_the_wheel_has_every_file_that_is_read_at_run_time(wheel):
    assert wheel.name.startswith(f"{DISTRIBUTION.replace('-', '_')}-{east.__version__}-")
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = [path.relative_to(ROOT) for path in (ROOT / "east").rglob("*") if path.is_file()]
    settings = [Path("east") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")]
    assert {path.as_posix() for path in [*package, *settings] if path.suffix != ".pyc"} <= packed
    assert "east/py.typed" in packed


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_folder(wheel, tmp_path, monkeypatch):
    """In an environment of its own, in which only the dependencies are those of this one."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path / "cache"))
    (empty := tmp_path / "empty").mkdir()
    venv.create(tmp_path / "venv")
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = str(tmp_path / "venv" / "bin" / "python")
    installation = ("-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--no-index", str(wheel))
    subprocess.run([python, *installation], check=True, cwd=empty)
    code = "import east; print(east.__file__)"
    where = subprocess.run([python, "-c", code], check=True, cwd=empty, capture_output=True, text=True).stdout
    assert where.startswith(str(packages))
    command = [str(Path(python).with_name("east-run")), "loss=f1", "trials=1", "protocol.max_epochs=2"]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in empty.iterdir()] == ["results"]


def locked() -> dict[str, str]:
    return {name: version for name, version, _ in LOCKED.findall((ROOT / "requirements.lock").read_text())}


def test_the_lock_file_has_only_names_versions_and_hashes():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    odd = [line for line in lines if not line.startswith("#") and not LOCKED.match(line)]
    assert not odd
    assert not any("://" in line for line in lines)
    assert declared("ray", "tensorboard") <= set(locked()), "pyproject.toml has changed: run scripts/lock"


def test_the_lock_file_has_the_versions_of_the_records():
    stored = [record["versions"] for record in exported()]
    assert stored
    [python] = {versions["python"] for versions in stored}
    wanted = {(name, version) for versions in stored for name, version in versions.items()}
    assert {item for item in wanted if item[0] not in ("python", "east")} <= set(locked().items())
    assert f"FROM python:{python.rpartition('.')[0]}-slim" in (ROOT / "Dockerfile").read_text()


def test_docker_installs_the_locked_versions_and_the_package():
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "requirements.lock", "east", "conf"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, f".dockerignore keeps {name} out of the image"
    installs = re.findall(r"pip install --no-cache-dir (.+)$", text, re.MULTILINE)
    assert installs == ["--require-hashes -r requirements.lock", "--no-deps ."]
    assert 'ENTRYPOINT ["east-run"]' in text


def test_the_hosted_checks_cover_every_supported_python():
    [job] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert any(step.get("run", "").startswith("scripts/test") for step in job["steps"])


def test_a_release_is_built_and_tried_before_it_is_published_without_a_token():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    build, publish = yaml.safe_load(text)["jobs"].values()
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}  # trusted publishing
    assert "permissions" not in build
    assert "secrets." not in text
    assert all(line in text for line in ("twine check --strict dist/*", "bin/east-run"))


def test_pre_commit_runs_the_checks_of_scripts_test():
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = {hook["entry"].partition(" -- ")[2] for hook in repository["hooks"]}
    assert {command.split()[0] for command in commands} == {"ruff", "mypy"}
    script = (ROOT / "scripts" / "test").read_text()
    assert all(re.search(rf"^{tool}\b", script, re.MULTILINE) for tool in ("ruff check", "ruff format", "mypy"))


def test_scripts_are_executable():
    names = ("quickstart", "test", "lock", "rtables", "docs", "notebooks.py")
    for name in (*(f"scripts/{name}" for name in names), ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name
