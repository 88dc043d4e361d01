"""One package, whose imports go one way: its core knows no room, attacks and defenses know only the core."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("attacks", "defenses", "eval")
FORBIDDEN = {
    "hiddenlab": {"hiddenlab.attacks", "hiddenlab.defenses", "hiddenlab.eval"},
    "attacks": {"hiddenlab.defenses", "hiddenlab.eval"},
    "defenses": {"hiddenlab.attacks", "hiddenlab.eval"},
    "eval": set(),
}
# A checkout has these folders too, but an installed package has not: nothing imports them by their short names.
NOT_INSTALLED = {*ROOMS, "tests"}


def imported(source: str) -> set[str]:
    """Packages that a module imports anywhere, inside functions and by a literal name too; of ours, the rooms."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    packages = set()
    for name in names:
        first, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        packages.add(f"{first}.{room}" if first == "hiddenlab" and room in ROOMS else first)
    return packages


def modules(folder: Path) -> list[Path]:
    """The modules of a folder, without those of the rooms that are linked into it."""
    links = [folder / room for room in ROOMS]
    return sorted(file for file in folder.rglob("*.py") if not any(link in file.parents for link in links))


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_go_one_way(folder: str) -> None:
    files = modules(ROOT / folder)
    assert files, f"no modules in {folder}"
    wrong = {
        str(file.relative_to(ROOT)): sorted(bad)
        for file in files
        if (bad := imported(file.read_text(encoding="utf-8")) & (FORBIDDEN[folder] | NOT_INSTALLED))
    }
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "hiddenlab" / room
    assert link.is_symlink() and link.resolve() == ROOT / room


def test_every_way_of_importing_is_noticed() -> None:
    source = """
import attacks.one
from hiddenlab import errors, eval
def f():
    from hiddenlab.defenses.two import x
    importlib.import_module("hiddenlab.attacks.three")
from . import tests
text = "import tests"
"""
    assert imported(source) == {
        "attacks", "hiddenlab", "hiddenlab.eval", "hiddenlab.defenses", "hiddenlab.attacks",
    }  # fmt: skip


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
