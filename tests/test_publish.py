"""What a stranger gets: the version, what the packages declare, and the files that a code host reads."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from email.message import Message
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from trove_classifiers import classifiers

from tests.test_docs import broken, prose
from tests.test_rooms import ROOMS, ROOT

GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADDRESS = "https://code.example/owner/name"
# A link or picture whose address names no site; the group is that of a picture.
RELATIVE = re.compile(r"(!\[[^\]]*)?\]\((?![a-z]+:|#)")
# Fails where importing the package starts a program, such as git.
IMPORT = """
import sys
def refuse(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        raise SystemExit(f"importing hiddenlab raised {event}")
sys.addaudithook(refuse)
# The finder of an editable install would take a missing _version.py from another folder.
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
import hiddenlab
assert "torch" not in sys.modules
print(hiddenlab.__version__)
"""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def metadata(tree: Path, place: Path, address: str) -> Message:
    """What a wheel built from a tree would declare."""
    code = f"""
from pathlib import Path
from setuptools import build_meta
print(Path({str(place)!r}, build_meta.prepare_metadata_for_build_wheel({str(place)!r}), "METADATA"))
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=env | {"HIDDENLAB_URL": address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return message_from_string(Path(done.stdout.splitlines()[-1]).read_text(encoding="utf-8"))


def test_a_tag_is_the_version_and_links_are_absolute_where_the_address_is_known(tmp_path: Path) -> None:
    tree = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "tag", "v9.8.7"], check=True)
    declared = metadata(tree, tmp_path, f"{ADDRESS}/")
    assert declared["Version"] == "9.8.7"
    assert "9.8.7" in (tree / "hiddenlab" / "_version.py").read_text(encoding="utf-8")
    assert declared.get_all("Project-URL") == [
        f"Repository, {ADDRESS}", f"Issues, {ADDRESS}/issues",
    ]  # fmt: skip
    assert declared["Description-Content-Type"] == "text/markdown"
    shown, written = declared.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert RELATIVE.findall(shown) == []
    pictures = [bool(picture) for picture in RELATIVE.findall(written)]
    assert shown.count(f"]({ADDRESS}/blob/HEAD/") == pictures.count(False) > 0
    assert shown.count(f"]({ADDRESS}/raw/HEAD/") == pictures.count(True)


def test_a_tree_without_git_has_the_version_that_is_written_down(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "hiddenlab").mkdir(parents=True)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "hiddenlab/__init__.py"):
        shutil.copy(ROOT / file, tree / file)
    declared = metadata(tree, tmp_path, "")
    assert declared["Version"] == "0.1.0.dev0"
    assert declared.get_all("Project-URL") is None
    assert declared.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(("written", "shown"), [("__version__ = '9.8.7'", "9.8.7"), (None, "0.1.0.dev0")])
def test_importing_reads_the_version_and_starts_no_program(
    written: str | None, shown: str, tmp_path: Path
) -> None:
    package = tmp_path / "hiddenlab"
    package.mkdir()
    for file in ("__init__.py", "__init__.pyi"):
        shutil.copy(ROOT / "hiddenlab" / file, package)
    if written is not None:
        (package / "_version.py").write_text(written, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == shown, done.stderr


def test_the_fallback_version_is_written_twice_alike() -> None:
    fallback = PROJECT["tool"]["setuptools_scm"]["fallback_version"]
    assert f'"{fallback}"' in (ROOT / "hiddenlab" / "__init__.py").read_text(encoding="utf-8")
    assert f"VERSION={fallback}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_classifiers_exist_and_name_the_tested_interpreters() -> None:
    listed = PROJECT["project"]["classifiers"]
    assert set(listed) <= classifiers
    versions = [c.rpartition(" ")[2] for c in listed if re.fullmatch(r".*Python :: 3\.\d+", c)]
    matrix = load(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == matrix[: len(versions)]  # the others are to be tested there, and have not been
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


def test_the_packages_hold_every_file_that_is_no_python() -> None:
    """Setuptools takes Python files by itself, and others by pattern."""
    command = ["git", "-C", str(ROOT), "ls-files", "hiddenlab", *ROOMS]
    tracked = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    others = [Path(f).name for f in tracked if not f.endswith((".py", ".md")) and not (ROOT / f).is_symlink()]
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    assert others and [name for name in others if not any(fnmatch(name, p) for p in patterns)] == []


def test_what_ci_makes_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    jobs = load(GITHUB / "workflows" / "ci.yml")["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    # A target that another line looks for may be missing.
    made = {t for line in lines if "grep" not in line for t in re.findall(r"\bmake ([a-z-]+)", line)}
    assert made >= {"check", "test", "dist"}
    assert made <= targets


def test_ci_may_only_read_and_its_actions_are_pinned() -> None:
    workflow = load(GITHUB / "workflows" / "ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job and job["timeout-minutes"]
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert uses and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in uses)


def test_the_image_installs_what_make_setup_installs() -> None:
    docker = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (model,) = re.findall(r"^MODEL := (\S+)$", makefile, re.M)
    assert model in docker
    (torch,) = set(re.findall(r"\btorch==\S+", docker + makefile))
    assert torch in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    users = re.findall(r"^USER (\S+)$", docker, re.M)
    assert users and users[-1] not in ("root", "0")


@pytest.mark.parametrize(
    "form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_ask_for_something(form: Path) -> None:
    fields = load(form)
    assert fields["name"] and fields["description"]
    asked = [field for field in fields["body"] if field["type"] != "markdown"]
    assert any(field.get("validations", {}).get("required") for field in asked)
    ids = [field["id"] for field in asked]
    assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in asked)


def test_the_citation_names_the_four_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"]
    assert citation["license"] == PROJECT["project"]["license"]
    starts = ("Hidden No More", "TopLoc", "DiFR", "Verifying LLM Inference")
    titles = [paper["title"] for paper in citation["references"]]
    assert len(titles) == 4 and all(
        title.startswith(start) for title, start in zip(titles, starts, strict=True)
    )
    assert all(paper["authors"] for paper in citation["references"])


@pytest.mark.parametrize("page", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_of_pages_beside_the_readme_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page, prose(ROOT / page)) == []
