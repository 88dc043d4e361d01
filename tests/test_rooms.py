"""One package, whose imports go one way, and whose wheel holds nothing else."""

import subprocess
import sys
import tomllib
import zipfile
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
        if "__" not in path.name and (path.suffix == ".py" or (path / "__init__.py").is_file())
    }
    assert own - {"hiddenlab.eval"} == listed - {"beartype.beartype"}


@pytest.mark.slow
def test_the_wheel_holds_hiddenlab_alone(tmp_path: Path) -> None:
    """Somebody's own eval.py and attacks/ lie beside a notebook that imports hiddenlab."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(tmp_path / "clone")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packages = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in packages if not name.endswith(".dist-info")} == {"hiddenlab"}
    site, desk = tmp_path / "site", tmp_path / "desk"
    zipfile.ZipFile(wheel).extractall(site)
    (desk / "attacks").mkdir(parents=True)
    (desk / "attacks" / "__init__.py").write_text("mine = True")
    (desk / "eval.py").write_text("mine = True")
    code = f"""
import sys
sys.path.insert(1, {str(site)!r})
import attacks, eval, hiddenlab
assert attacks.mine and eval.mine and hiddenlab.__file__.startswith({str(site)!r})
from hiddenlab import registry
for kind in registry.BUILTINS:
    for name in registry.BUILTINS[kind]:
        assert registry.resolve(kind, name).__module__.startswith("hiddenlab."), name
"""
    subprocess.run([sys.executable, "-c", code], cwd=desk, check=True)
