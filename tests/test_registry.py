"""Names resolve alike for built-ins and plugins, and every wrong name or parameter gets one helpful line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab import registry
from hiddenlab.errors import HiddenlabError, InputError, UnknownNameError

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = Path(__file__).resolve().parent / "plugin"

WORDS = st.text(st.characters(exclude_characters=":,=", exclude_categories=["Cs"]), min_size=1)
WORDS = WORDS.filter(lambda word: word == word.strip())


# ---- specs


@given(name=WORDS, first=st.none() | WORDS, rest=st.dictionaries(WORDS, WORDS, max_size=4))
def test_a_spec_reads_back_what_was_written(name: str, first: str | None, rest: dict[str, str]) -> None:
    parts = ([first] if first is not None else []) + [f"{key}={value}" for key, value in rest.items()]
    spec = f"{name}:{','.join(parts)}" if parts else name
    expected = rest if first is None else {registry.POSITIONAL: first} | rest
    assert registry.parse_spec(spec) == (name, expected)


@given(st.text())
def test_any_text_is_parsed_or_refused_in_one_line(text: str) -> None:
    try:
        name, values = registry.parse_spec(text)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert name and all(values.values())


@pytest.mark.parametrize(
    "spec", ["", ":", ":a=1", "a:", "a:=1", "a:b=", "a:b=1,", "a:b=1,b=2", "a:b=1,2", "a:1,2"]
)
def test_malformed_specs_are_refused(spec: str) -> None:
    with pytest.raises(InputError):
        registry.parse_spec(spec)


# ---- names


def test_unknown_names_get_the_nearest_and_the_list() -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("defenses", "seq-prm")
    assert str(caught.value).startswith(
        "unknown defense 'seq-prm'; did you mean seq-perm? known: identity, seq-perm"
    )
    with pytest.raises(UnknownNameError, match=r"^unknown attack 'zzz'; known: vocab-match"):
        registry.resolve("attacks", "zzz")
    with pytest.raises(UnknownNameError, match="unknown kind 'cheese'"):
        registry.names("cheese")


@pytest.mark.parametrize("name", registry.BUILTINS["defenses"])
def test_every_builtin_defense_is_there_and_says_who_knows_what(name: str) -> None:
    needed = {
        "gaussian": ":sigma=0.5", "sparsify": ":keep=0.5", "dtype": ":bfloat16",
        "shard": ":alpha=4,c=2,m=2,queries=0,keys=3", "drop-rows": ":size=2", "round": ":int8",
        "project": ":count=4,seed=2,sigma=0.5", "decoys": ":count=2", "kv-cloak": ":heads=2,mask=false",
        "truncated-svd": ":share=0.5", "output-noise": ":sigma=0.5,scale=none,kind=laplace",
        "dchi": ":eta=50", "snd": ":eta=50,noise=code", "dp-forward": ":epsilon=8",
        "santext": ":epsilon=2", "custext": ":epsilon=2", "rantext": ":epsilon=2",
    }  # fmt: skip
    defense = registry.build("defenses", name + needed.get(name, ""))
    again = registry.build("defenses", defense.spec)
    assert type(again) is registry.resolve("defenses", name) and again.spec == defense.spec
    assert repr(defense).startswith(f"{defense.spec}: ") and "attacker" in repr(defense)
    assert "\n" not in repr(defense)


def test_listing_names_loads_no_torch() -> None:
    code = (
        "import sys; from hiddenlab import registry; print(*registry.names('defenses'));"
        "sys.exit('torch' in sys.modules)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["identity", "seq-perm"]


def test_describe_gives_summary_and_parameters() -> None:
    found = {line.name: line for line in registry.describe("defenses")}
    assert found["gaussian"].parameters == "sigma: float"
    assert found["hidden-perm"].parameters == "mode: per-row|shared = per-row"
    assert found["seq-perm"].summary == "Shuffle the rows of the states (Hidden No More, section 5.2.1)."
    assert not found["seq-perm"].parameters


def test_describe_lists_what_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTINS["defenses"], "broken", "no_such_module_here:Broken")
    line = next(line for line in registry.describe("defenses") if line.name == "broken")
    assert line.summary.startswith("not usable: cannot load the defense 'broken'")


# ---- parameters


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gaussian", "the defense gaussian needs sigma; it takes sigma: float"),
        ("gaussian:sigma=-1", "sigma > 0, not -1.0"),
        ("gaussian:sigma=nan", "expected a finite number"),
        ("gaussian:sigma=inf", "expected a finite number"),
        ("project:count=" + "9" * 30, "expected a finite number"),
        ("shard:alpha=200000000,c=1,node=0", "200000000 CompNodes with 1 splits each are more than 65536"),
        ("gaussian:sigma=much", "cannot use sigma='much': expected float; it takes sigma: float"),
        ("gaussian:sgma=1", "has no parameter 'sgma'; it takes sigma: float"),
        ("gaussian:0.1,sigma=0.1", "cannot use the value '0.1'; it takes sigma: float"),
        ("hidden-perm:foo", "cannot use mode='foo': expected one of per-row, shared; it takes mode"),
        ("seq-perm:2", "cannot use the value '2'; it takes no parameters"),
        ("seq-perm:rows=2", "has no parameter 'rows'; it takes no parameters"),
        ("dtype", "needs dtype; it takes dtype: float32|bfloat16|float16"),
        ("gausian:sigma=1", "unknown defense 'gausian'; did you mean gaussian?"),
    ],
)
def test_wrong_parameters_get_one_line_naming_the_right_ones(spec: str, says: str) -> None:
    with pytest.raises(HiddenlabError) as caught:
        registry.build("defenses", spec)
    assert says in str(caught.value) and "\n" not in str(caught.value)


class Probe:
    """Keeps what it was given."""

    def __init__(
        self,
        number: int = 0,
        flag: bool = False,
        share: float = 0.0,
        word: str = "",
        choice: Literal["a", 2] = "a",
        limit: int | None = None,
        threshold: str | float = "auto",
        call: Callable[[], Any] = list,
    ) -> None:
        self.got = {name: value for name, value in locals().items() if name != "self"}
        if number == 13:
            raise ValueError("thirteen")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(sys.modules[__name__], "Probe", Probe)
    sys.modules.setdefault("probe_for_registry", sys.modules[__name__])
    monkeypatch.setitem(registry.BUILTINS["defenses"], "probe", "probe_for_registry:Probe")

    def build(parameters: str, **extra: Any) -> dict[str, Any]:
        return registry.build("defenses", f"probe{parameters}", **extra).got  # type: ignore[no-any-return]

    return build


def test_values_follow_the_annotations(probe: Callable[..., dict[str, Any]]) -> None:
    got = probe(":number=3,flag=yes,share=1e-3,word=5,choice=2,limit=7,threshold=0.5")
    assert got == {
        "number": 3, "flag": True, "share": 1e-3, "word": "5", "choice": 2, "limit": 7, "threshold": 0.5,
        "call": list,
    }  # fmt: skip
    assert [type(value) for value in got.values()][:7] == [int, bool, float, str, int, int, float]
    assert probe(":limit=none")["limit"] is None
    assert probe(":threshold=calibrated")["threshold"] == "calibrated"
    assert probe(":4")["number"] == 4


@pytest.mark.parametrize(
    "parameters", [":number=1.5", ":flag=maybe", ":choice=3", ":limit=few", ":call=print", ":13"]
)
def test_values_that_do_not_fit_are_refused(probe: Callable[..., dict[str, Any]], parameters: str) -> None:
    with pytest.raises(InputError, match="it takes number: int = 0"):
        probe(parameters)


def test_extra_options_are_taken_where_declared_and_give_way_to_the_spec(
    probe: Callable[..., dict[str, Any]],
) -> None:
    got = probe(":number=3", number=4, share=0.5, limit="9", call=len, foreign=1)
    assert (got["number"], got["share"], got["limit"], got["call"]) == (3, 0.5, 9, len)


# ---- plugins


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees the repository and the given folders."""
    places = [str(place) for place in (*path, ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )


def install(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_plugin_that_takes_a_known_name_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(PLUGIN, source)
    project = source / "pyproject.toml"
    project.write_text(
        project.read_text(encoding="utf-8").replace("\ndecimal =", "\nseq-perm ="), encoding="utf-8"
    )
    install(source, tmp_path / "site")
    code = (
        "from hiddenlab import registry; from hiddenlab.errors import HiddenlabError\n"
        "registry.names('attacks')\n"
        "calls = lambda: registry.names('defenses'), lambda: registry.resolve('defenses', 'seq-perm')\n"
        "for call in calls:\n"
        "    try: call()\n"
        "    except HiddenlabError as error: print(error)\n"
    )
    done = python(code, tmp_path / "site")
    line = (
        "the plugin hiddenlab-example registers the defense 'seq-perm', a name that hiddenlab itself "
        "already has; rename it in the plugin, or uninstall the plugin"
    )
    assert done.stdout.splitlines() == [line, line], done.stderr


def test_two_plugins_with_one_name_are_refused_and_one_listed_twice_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        EntryPoint("mine", "one:A", "hiddenlab.defenses"),
        EntryPoint("mine", "one:A", "hiddenlab.defenses"),
    ]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: found if group == "hiddenlab.defenses" else []
    )
    assert registry.names("defenses").count("mine") == 1
    found[1] = EntryPoint("mine", "two:B", "hiddenlab.defenses")
    with pytest.raises(HiddenlabError, match="'mine', a name that a plugin already has"):
        registry.names("defenses")


@pytest.mark.parametrize("value", ["no_such_module_here:A", "os:NoSuchName", "os:sep", "os.path:"])
def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("mine", value, "hiddenlab.defenses")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(HiddenlabError, match="the defense 'mine'"):
        registry.resolve("defenses", "mine")
