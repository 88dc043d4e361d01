"""One package, whose imports go one way, and whose wheel holds nothing else."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("attacks", "defenses", "eval")


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "hiddenlab" / room
    assert link.is_symlink() and link.resolve() == ROOT / room


def test_the_contract_notices_a_circle(tmp_path: Path) -> None:
    """The tool follows the links, so that no room is outside the contract that 'make check' holds."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    linter = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    kept = subprocess.run(linter, cwd=clone, capture_output=True, text=True)
    assert kept.returncode == 0, kept.stdout
    for file, line in (
        ("hiddenlab/types.py", "import hiddenlab.job"),
        ("attacks/nearest.py", "from hiddenlab.defenses import noise"),
        ("hiddenlab/prompts.py", "import hiddenlab.eval.cells"),
    ):
        before = (clone / file).read_text(encoding="utf-8")
        (clone / file).write_text(f"{before}\n\ndef late() -> None:\n    {line}\n", encoding="utf-8")
        broken = subprocess.run(linter, cwd=clone, capture_output=True, text=True)
        assert broken.returncode == 1 and "BROKEN" in broken.stdout, file
        (clone / file).write_text(before, encoding="utf-8")


def test_shapes_are_checked_in_every_module_but_the_measurements() -> None:
    """The setting lists modules one by one, so that a new one would be left out without a word."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (option,) = [o for o in settings["tool"]["pytest"]["ini_options"]["addopts"] if "jaxtyping" in o]
    listed = set(option.partition("=")[2].split(","))
    own = {
        f"hiddenlab.{path.stem}"
        for path in (ROOT / "hiddenlab").iterdir()
        # The build writes _version.py.
        if "__" not in path.name
        and path.name != "_version.py"
        and (path.suffix == ".py" or (path / "__init__.py").is_file())
    }
    assert own - {"hiddenlab.eval"} == listed - {"beartype.beartype"}
