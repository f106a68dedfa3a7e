"""What no module owns: packaging, the Docker image, the scripts, the README's snippets."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_docker_copies_what_exists_and_installs_the_package():
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "east", "conf"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, f".dockerignore keeps {name} out of the image"
    install = re.search(r'pip install .*"\.\[(.+)\]"', text)
    assert install is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(install.group(1).split(",")) <= set(extras)
    assert 'ENTRYPOINT ["east-run"]' in text


def test_scripts_are_executable():
    for name in ("scripts/quickstart", "scripts/test", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(snippets())))
def test_readme_snippets_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippets()[number], f"README snippet {number}", "exec"), {"__name__": "snippet"})
