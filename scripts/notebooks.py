#!/usr/bin/env python3
"""Execute the notebooks of docs/notebooks and store their outputs, as Jupyter's "Restart and run all" does.

    scripts/notebooks.py            # all of them, each in an interpreter and an empty folder of its own
    scripts/notebooks.py FILE       # one of them

A cell's outputs are what it prints, the value of its last line, and the open figures. Jupyter is not needed. As a hook
of mkdocs (see mkdocs.yml), this file turns the notebooks into pages.
"""

import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def value_of(source: str, namespace: dict[str, Any]) -> object:
    """Execute a cell; the value of its last line, None if that is a statement."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace) if last else None


def figures() -> list[bytes]:
    """The open figures as PNG; none if nothing has drawn."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    pyplot, images = sys.modules["matplotlib.pyplot"], []
    for number in pyplot.get_fignums():
        image = io.BytesIO()
        pyplot.figure(number).savefig(image, format="png", dpi=80, bbox_inches="tight")
        images.append(image.getvalue())
    pyplot.close("all")
    return images


def outputs_of(source: str, namespace: dict[str, Any]) -> list[dict]:
    """Execute a cell and return its outputs in the notebook's format."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        value = value_of(source, namespace)
    outputs: list[dict] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None:
        outputs.append(display({"text/plain": lines(repr(value))}))
    return outputs + [display({"image/png": base64.b64encode(image).decode()}) for image in figures()]


def display(data: dict[str, Any]) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": data}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def execute(file: Path) -> dict:
    """The notebook with new outputs; it runs in the working directory."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"], cell["outputs"] = number, outputs_of("".join(cell["source"]), namespace)
    return notebook


def page(notebook: dict) -> str:
    """A notebook as Markdown: its text, its code, and what that printed."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        blocks.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text") or data.get("text/plain", ""))
            image = data.get("image/png")
            blocks.append(f"![figure](data:image/png;base64,{image})" if image else f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(blocks) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: a page in place of every notebook."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        text = page(json.loads(file.content_string))
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs: links to notebooks lead to their pages."""
    return markdown.replace(".ipynb)", ".md)")


def main() -> None:
    if sys.argv[1:2] == ["--here"]:  # in the interpreter and folder that were made for it
        print(json.dumps(execute(Path(sys.argv[2])), ensure_ascii=False, indent=1))
        return
    for file in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--here", str(file.resolve())]
            environment = os.environ | {"MPLBACKEND": "agg"}
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
        file.write_bytes(done.stdout)
        print(f"{file.name}: {len(done.stdout) >> 10} KB")


if __name__ == "__main__":
    main()
