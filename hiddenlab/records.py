"""Write and read records of runs: a directory with ``record.json`` (the request and outcome) and ``samples.jsonl``.

``record.json`` is written first with status ``started`` and replaced atomically afterwards; ``samples.jsonl`` grows by
one line for each prompt, and is put into the prompts' order at the end. So a run that was killed, or whose disk filled
up, stays readable and resumable.
"""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pydantic import with_config
from typing_extensions import TypedDict

from hiddenlab import registry
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.summary import Sample, sample_form
from hiddenlab.text import count_of
from hiddenlab.utils.digests import digest_of
from hiddenlab.utils.files import put_file
from hiddenlab.utils.schema import CLOSED, Count, Finite, Positive, loads, parse, read_bytes

FORMAT = 1
RECORD, SAMPLES = "record.json", "samples.jsonl"
FORMED = ("attack", "assess")  # verbs whose samples have a form
UNFINISHED = ("started", "interrupted", "failed")


class RecordError(HiddenlabError):
    """A record could not be written or read."""


@with_config(CLOSED)
class Resumed(TypedDict):
    """When a run was resumed, after how many prompts, and by which code."""

    at: str
    after: Count
    code: dict[str, Any]


@dataclass(kw_only=True)
class RunRecord:
    """The content of ``record.json``. What was not measured is None, never zero.

    Attributes:
        code: by which the run was started. resumed: each time that it was resumed.
    """

    __pydantic_config__ = CLOSED

    format: int = FORMAT
    verb: str
    status: str = "started"
    spec: dict[str, Any]
    started: str = ""
    finished: str | None = None
    command: list[str] = field(default_factory=list)
    inputs_sha256: str | None = None
    prompts: Count | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    setup: dict[str, Finite | str | list[str] | None] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    error: str | None = None
    resumed: list[Resumed] = field(default_factory=list)
    code: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, str | None] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    threads: Positive | None = None

    @property
    def commits(self) -> list[str]:
        """The commits whose code ran the prompts, each once; "unknown" where one is not recorded."""
        parts = [(0, self.code), *((part["after"], part["code"]) for part in self.resumed)]
        # Parts that were interrupted before their first prompt ran none.
        made = [
            code
            for (after, code), then in zip(parts, [*parts[1:], None], strict=True)
            if then is None or then[0] != after
        ]
        names = list(dict.fromkeys(map(commit_name, made)))
        return [name or "unknown" for name in names] if any(names) else []


def commit_name(code: Mapping[str, Any]) -> str | None:
    """Return the short name of a record's commit, with a plus if files had changed since; None if it is not known."""
    if not code.get("commit"):
        return None
    return str(code["commit"])[:12] + ("+" if code.get("dirty") else "")


def foreign_code(record: RunRecord) -> list[str]:
    """Return whose code a run ran beside the lab's: its model's checkpoint, files with defenses or attacks."""
    spec, lists = record.spec, (record.spec.get("defense"), record.setup.get("attacks"))
    specs = [spec.get("attack"), *(one for given in lists if isinstance(given, list) for one in given)]
    checkpoint = [f"its model {spec.get('model')}"] if spec.get("trust_remote_code") else []
    files = [file for one in specs if isinstance(one, str) for file in registry.files_of(one)]
    return checkpoint + list(dict.fromkeys(files))


def resume_command(record: RunRecord, path: Path) -> str:
    """Return the command that goes on with a run that has not ended."""
    trust = " --trust-remote-code" if foreign_code(record) else ""
    return f"hiddenlab rerun {shlex.quote(str(path))} --resume{trust}"


class Recorder:
    """Keeps a run's samples and, unless ``path`` is None, writes them and the record to that directory."""

    def __init__(self, record: RunRecord, path: Path | None, samples: Sequence[Sample] = ()) -> None:
        self.record = record
        self.path = path
        self.samples = list(samples)
        self._lock = None if path is None else _locked(path)

    @classmethod
    def create(
        cls,
        record: RunRecord,
        *,
        out: Path | None = None,
        runs_dir: Path = Path("runs"),
        keep: bool = True,
        environment: Mapping[str, Any] | None = None,
    ) -> "Recorder":
        """Start a run, in ``out`` or in a new directory of ``runs_dir``; nowhere when ``keep`` is false.

        Args:
            environment: fields of the record that are not those of this process.

        Raises:
            InputError: ``out`` exists and is not an empty directory.
            RecordError: the directory cannot be written.
        """
        from hiddenlab.utils.environment import describe_environment

        record.started = _now()
        if not keep:
            return cls(record, None)
        for name, value in {**describe_environment(), **(environment or {})}.items():
            setattr(record, name, value)
        if out is not None:
            check_new(out)
        try:
            path = _new_directory(record, runs_dir) if out is None else out
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot make the run directory: {_reason(error)} ({error.filename})") from None
        recorder = cls(record, path)
        recorder._append_bytes(b"")
        recorder.save()
        return recorder

    @classmethod
    def resume(cls, path: Path, inputs_sha256: str) -> "Recorder":
        """Resume a run that has not finished; a torn last sample is cut off.

        Raises:
            InputError: there is no record, its samples are damaged, or it was started on other inputs.
        """
        from hiddenlab.utils.environment import describe_environment

        record, samples, good = _load(path)
        if record.inputs_sha256 != inputs_sha256:
            raise InputError(
                f"the prompts or observations have changed since {path} was started; run it anew"
            )
        recorder = cls(record, path, samples)
        recorder._cut(good)
        record.status, record.finished, record.error = "started", None, None
        record.resumed.append({"at": _now(), "after": len(samples), "code": describe_environment()["code"]})
        recorder.save()
        return recorder

    def append(self, sample: Sample) -> None:
        """Record one prompt's outcome at once.

        Raises:
            RecordError: it cannot be written (a full disk); earlier samples stay as they were.
        """
        self._append_bytes(_line(sample))
        self.samples.append(sample)

    def save(self) -> None:
        """Replace ``record.json`` atomically."""
        if self.path is None:
            return
        text = json.dumps(finite(asdict(self.record)), ensure_ascii=False, indent=1) + "\n"
        try:
            put_file(self.path / RECORD, text.encode(), private=True)
        except OSError as error:
            raise self._cannot_write(error) from None

    def close(self, status: str, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Record how the run ended: ``finished``, ``interrupted`` or ``failed``; samples get the prompts' order."""
        self._sort()
        self.record.status, self.record.error, self.record.finished = status, error, _now()
        self.record.summary = summary
        try:
            self.save()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _sort(self) -> None:
        """Bring the samples of an attack into the prompts' order; several workers end in another."""
        ordered = _in_order(self.samples)
        if ordered == self.samples:
            return
        self.samples = ordered
        if self.path is not None:
            try:
                put_file(self.path / SAMPLES, b"".join(map(_line, ordered)), private=True)
            except OSError as error:
                raise self._cannot_write(error) from None

    def _cut(self, size: int) -> None:
        """Cut off a torn last sample."""
        if self.path is None or not (self.path / SAMPLES).exists():
            return
        try:
            with open(self.path / SAMPLES, "r+b", buffering=0, opener=_private) as handle:
                handle.truncate(size)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _append_bytes(self, data: bytes) -> None:
        if self.path is None:
            return
        try:
            with open(self.path / SAMPLES, "ab", buffering=0, opener=_private) as handle:
                before = os.fstat(handle.fileno()).st_size
                try:
                    _write_all(handle, data)
                except BaseException:
                    os.ftruncate(handle.fileno(), before)
                    raise
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> RecordError:
        assert self.path is not None
        return RecordError(
            f"cannot write the record in {self.path}: {_reason(error)}; what it holds "
            f"({count_of(len(self.samples), 'prompt')}) stays readable, and "
            f"'{resume_command(self.record, self.path)}' continues it"
        )


def read_run(path: Path) -> tuple[RunRecord, list[Sample]]:
    """Return the record and the samples of a run directory, finished or not; a torn last sample is left out.

    Raises:
        InputError: there is no record, it is damaged, or of a newer format.
    """
    record, samples, _ = _load(path)
    return record, samples


def check_new(path: Path) -> None:
    """Check that a directory for something new does not exist, or is empty, and that it can be made.

    Raises:
        InputError: it exists and holds something, or nothing can be written there.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is not an empty directory; name a new one")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Check that a directory can be made or written to, before any work is done for what goes there.

    Permissions do not say it of every file system. So a directory is made there, and removed.

    Raises:
        InputError: it cannot.
    """
    made: list[Path] = []
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        Path(mkdtemp(dir=path)).rmdir()
    except OSError as error:
        raise InputError(
            f"cannot record the run in {path} ({_reason(error)}); name another place with --out or --runs-dir, or "
            "leave the record out"
        ) from None
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # another process may have put something there
                folder.rmdir()


def _load(path: Path) -> tuple[RunRecord, list[Sample], int]:
    """Return record, samples, and how many bytes of ``samples.jsonl`` are whole lines."""
    if not (path / RECORD).is_file():
        raise InputError(f"{path} is no run directory: it holds no {RECORD}")
    record = parse(read_bytes(path / RECORD), RunRecord, str(path / RECORD), FORMAT)
    samples, good = _load_samples(path / SAMPLES, record.verb)
    return record, samples, good


def _load_samples(path: Path, verb: str) -> tuple[list[Sample], int]:
    if not path.exists():
        return [], 0
    content = read_bytes(path)
    good = content.rfind(b"\n") + 1  # a torn last line is left out
    samples: list[Sample] = []
    seen: set[tuple[Any, ...]] = set()
    try:
        for number, line in enumerate(content[:good].split(b"\n")[:-1], 1):
            where = f"{path}, line {number}"
            form = sample_form(loads(line, where), verb) if verb in FORMED else Sample
            samples.append(parse(line, form, where))
            if verb in FORMED:
                if (place := _place(samples[-1])) in seen:
                    raise InputError(f"{where}: {_named(samples[-1])} stands twice")
                seen.add(place)
    except InputError as error:
        raise InputError(f"{error}; cut the file before that line to resume from there") from None
    return _in_order(samples), good


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples in the prompts' order, attack by attack; those of other verbs stay as they are."""
    return sorted(samples, key=_place)


def _place(sample: Sample) -> tuple[Any, ...]:
    """Return where a sample stands: its prompt; of ``assess`` part, attack and prompt, the ends of its turns behind."""
    return (
        sample.get("part", ""),
        sample.get("step", 0),
        sample.get("index", math.inf if "step" in sample else 0),
        sample.get("turn", 0),
    )


def _named(sample: Sample) -> str:
    return f"the prompt {sample['index']}" if "index" in sample else f"the end of {sample['attack']}"


def _line(sample: Sample) -> bytes:
    return (json.dumps(finite(sample), ensure_ascii=False) + "\n").encode()


def _new_directory(record: RunRecord, runs_dir: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    digest = digest_of(record.spec)[:8]
    runs_dir.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        path = runs_dir / f"{stamp}-{record.verb}-{digest}{suffix}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise RecordError(f"cannot find a free name for a run in {runs_dir}")


def _locked(path: Path) -> int | None:
    """Lock a run against other writing processes; the lock ends with the process.

    Raises:
        InputError: another process writes it now.
    """
    try:
        import fcntl

        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError:
        os.close(handle)
        raise InputError(
            f"{path} is being written by another process; wait for it, or stop it first"
        ) from None
    except (ImportError, OSError):  # no such locks here
        return None


def _private(name: str, flags: int) -> int:
    """Open for the owner alone, since records hold prompts; never through a link, which may lead anywhere."""
    return os.open(name, flags | os.O_NOFOLLOW, 0o600)


def _write_all(handle: FileIO, data: bytes) -> None:
    # An unbuffered write may take only a part (a nearly full disk), and tells so only by its count.
    while data:
        data = data[handle.write(data) or 0 :]


def finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinity as null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
