"""Structure: two storeys, imports point upwards, the command starts without torch, no machine's paths are committed."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.tracked import tracked

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "east"
# The rooms of the package, from the top: each may import itself and those before it.
LIBRARY = ["choices", "arrays", "confusion", "metrics", "losses", "decisions"]  # torch and NumPy only
LABORATORY = ["files", "bars", "settings", "data", "models", "training", "experiment", "reporting", "tasks", "cli"]
ROOMS = [*LIBRARY, *(f"lab.{name}" for name in LABORATORY), "estimator", "metric_classifier"]
ALIASES = ("baselines", "data", "records")  # names that records and users refer to; one import each
HEAVY = {"pydantic", "hydra", "omegaconf", "pandas", "sklearn", "matplotlib", "torchvision", "scipy"}


def room_of(path):
    """The room that a file belongs to."""
    parts = [part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts]
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) not in ("__init__", "lab.__init__", *ALIASES)]


def imports(path):
    """Dotted names of a file's imports, at the top or inside functions, except those only for type checking."""
    nodes = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def test_the_map_lists_every_room():
    assert {room_of(path) for path in FILES} == {*ROOMS}
    drawing = re.search(r"```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)[1]
    drawn = re.findall(r"(?m)^ {3,5}(\w+)[./]|  (\w+)[./](?:py)? ", drawing)
    assert {name for pair in drawn for name in pair if name} == {room.removeprefix("lab.") for room in ROOMS} | {"lab"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_upwards(path):
    own = ROOMS.index(room_of(path))
    names = [name.split(".") for name in imports(path)]
    used = {room for name in names if name[0] == "east" for room in (".".join(name[1:3]), name[1]) if room in ROOMS}
    assert not {room for room in used if ROOMS.index(room) > own}
    assert all(name[0] for name in names), "a relative import"
    if room_of(path) in LIBRARY:  # ap_perf is optional
        assert {name[0] for name in names} <= {"torch", "numpy", "east", "ap_perf", *sys.stdlib_module_names}


def test_a_class_has_its_name_to_itself():
    """Two things of one name have to be told apart by their imports; only inside losses/ may modules share one."""
    places = {}
    for path in FILES:
        place = "losses" if room_of(path) == "losses" else path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(place)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    "statement, without",
    [
        ("from east import MetricLoss, MetricCrossEntropy, decide, METRICS, Confusion", HEAVY),
        # The metrics score recorded counts with NumPy alone.
        ("import east, east.lab.cli, east.metrics", HEAVY | {"torch"}),
    ],
    ids=["the library needs only torch and NumPy", "the command starts without torch"],
)
def test_what_an_import_loads(statement, without):
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    loaded = {module.partition(".")[0] for module in answer.stdout.split()}
    assert "east" in loaded
    assert not loaded & without


def tracked_texts():
    """Every handwritten text of the repository: tracked files except data and results."""
    suffixes = {".py", ".yaml", ".yml", ".toml", ".md", ".sh", ".js", ".css", ".html", ".cfg", ".txt", ""}
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in suffixes and not name.startswith("results/records"):
            yield name, path.read_text()


def test_no_path_or_host_of_a_machine_is_committed():
    """No absolute paths of a home folder, this checkout or its neighbours, and no hosts of package registries."""
    here = f"{re.escape(str(ROOT))}/|{re.escape(str(ROOT.parent))}/shared"
    homes = r"(?<![\w.~])/(?:home|root|Users|mnt)/[\w.]"
    registries = r"pypi\.org|pythonhosted\.org|registry\.npmjs|npmjs\.com|crates\.io|anaconda\.org"
    found = [
        f"{name}: {match[0]}"
        for name, text in tracked_texts()
        if name != "tests/test_architecture.py"
        for match in re.finditer(f"{here}|{homes}|{registries}", text)
    ]
    assert not found, found


def test_everything_that_the_architecture_page_names_exists():
    """Every `file.py` of its tables, and every `name` that follows it in the same cell."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = {word for word in re.findall(r"`([\w/]+\.(?:py|yaml))`", text) if "<" not in word}
    assert len(files) > 20
    for name in files:
        assert (PACKAGE / name).is_file() or (ROOT / name).is_file(), name
    for line in (line for line in text.splitlines() if line.startswith("| ")):
        for file, names in re.findall(r"`([\w/]+\.py)`((?:(?:, | and )`[\w.]+`)+)", line):
            source = (PACKAGE / file).read_text(encoding="utf-8")
            for name in re.findall(r"`([\w.]+)`", names):
                assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b|^{name} *[:=]", source, re.MULTILINE), name


PRIVATE = {  # interfaces that their libraries do not promise -> the only files that use them, and where they are
    "torch._fused_adam": ("lab/training/optimizer.py", "torch:_fused_adamw_"),
    "_are_functorch_transforms_active": ("losses/inputs.py", "torch._C:_are_functorch_transforms_active"),
    "hydra.core.override_parser": (
        "lab/settings/command.py",
        "hydra.core.override_parser.overrides_parser:OverridesParser",
    ),
    "_check_sample_weight": (
        "estimator.py lab/training/crossfit.py metric_classifier.py",
        "sklearn.utils.validation:_check_sample_weight",
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_interface_is_used_where_it_is_listed_and_still_exists(name):
    place, path = PRIVATE[name]
    users = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if name in file.read_text()}
    assert users == {*place.split()}
    module, _, attribute = path.partition(":")
    library = import_module(module.partition(".")[0])
    assert hasattr(import_module(module), attribute), f"gone in {library.__name__} {library.__version__}: see {place}"


@pytest.mark.parametrize("file", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda file: file.name)
def test_a_script_imports_what_exists(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "east":
            module = import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or import_module(f"{node.module}.{name.name}"), name.name
