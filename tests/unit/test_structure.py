"""The split rule: what sends or receives is in a script, the rest is in replica/.

But for the one file that carries ps_mode.py's bytes, as Horovod does train.py's.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "replica").glob("*.py"))


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_replica_communicates_nowhere_and_has_tensorflow_in_the_model_only(path):
    expected = {"mpi4py"} if path.name == "link.py" else set()
    assert imports(path) & {"mpi4py", "horovod"} == expected
    assert ("tensorflow" in imports(path)) == (path.name == "model.py")


@pytest.mark.parametrize("script", ["train", "ps_mode"])
def test_importing_a_script_starts_nothing_and_loads_no_framework(script):
    names = "{'tensorflow', 'horovod', 'mpi4py'}"
    code = f"import {script}, sys; print({names} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
