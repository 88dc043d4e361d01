"""What recording nodes saw is what the plan gives them, is the plain model's, and comes back from files as it was."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from hiddenlab.defenses.cascade.backend import Settings
from hiddenlab.defenses.cascade.cost import Shape
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_views import Seen, save_seen
from hiddenlab.errors import InputError
from hiddenlab.job import _fits
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.observation import (
    check_observation,
    load_observation,
    load_observations,
    load_site,
    save_observation,
)
from hiddenlab.sharding import Plan, Positions
from hiddenlab.testing import LAYERS, VOCABULARY, WIDTH, PlainModel
from hiddenlab.truths import load_truth
from hiddenlab.types import Observation, Site
from tests.marks import slow_cases

TinyPath = Callable[..., str]
Files = dict[str, dict[str, Observation]]
SIGNATURE = (0.5, -0.25)


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def recorder(path: str, **options: Any) -> LocalCascade:
    return LocalCascade(load_cascade_model(path), Settings(record=True, **options), name="tiny/model")


def written(seen: Sequence[Seen], folder: Path, **options: Any) -> tuple[Files, dict[str, dict[str, Any]]]:
    """Observations by folder and file, as they come back from the disk; and what ``save_seen`` says."""
    said = save_seen(seen, folder, model="tiny/model", signature=SIGNATURE, dtype="float32", **options)
    found: Files = {}
    for path in sorted(folder.glob("*.safetensors")):
        held = {f"{one.info.site.stream}-{one.info.site.layer}": one for one in load_observations(path)}
        assert len(held) == len(load_observations(path))  # a site stands once in a file
        found[path.stem] = held
    return found, said


def rows_of(held: Mapping[str, Observation]) -> int:
    """How many rows a node saw: those of each key shard count, and the joint view of the second layer repeats rows."""
    return sum(
        len(one.states) * len(one.info.facts.get("shards", [()]))
        for name, one in held.items()
        if name.partition("-")[0] not in ("qkv", "kv")
    )


def positions_of(observation: Observation) -> list[int]:
    assert observation.info.positions is not None
    return list(observation.info.positions)


@contextmanager
def traced(model: Any) -> Iterator[list[dict[str, Tensor]]]:
    """Queries, keys, values and outputs of each of transformers' own attention calls, ``[position, all heads]``."""
    module = sys.modules[type(model).__module__]
    calls: list[dict[str, Tensor]] = []
    eager = module.eager_attention_forward

    def trace(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        output = eager(layer, query, key, value, *args, **options)
        flat = {"q": query, "k": key, "v": value, "out": output[0].transpose(1, 2)}
        calls.append({name: one[0].transpose(0, 1).flatten(1) for name, one in flat.items()})
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", trace)
        yield calls


def plain_calls(path: str, tokens: Tensor) -> list[dict[str, Tensor]]:
    plain = PlainModel(path)
    with traced(plain.model) as calls:
        plain.states(tokens.tolist(), LAYERS)
    assert len(calls) == LAYERS
    return calls


def expected_files(made: Plan) -> dict[str, dict[str, Positions]]:
    """By node the sites of one pass, and of which positions their rows are."""
    out: dict[str, dict[str, Positions]] = {}
    for i, shard in enumerate(made.shards):
        files = {"embed-0": shard} | {f"resid-{layer}": shard for layer in range(1, LAYERS + 1)}
        files |= {f"attn-{layer}": shard for layer in range(1, LAYERS + 1)}
        out[f"CompNode-{i}"] = files
    for j in range(made.beta):
        for k in range(j if made.symmetric else 0, made.beta):
            both = tuple(sorted({*made.splits[j], *made.splits[k]}))
            queries, keys = (both, both) if made.symmetric else (made.splits[j], made.splits[k])
            own = {
                f"{stream}-{layer}": queries if stream == "q" else keys
                for stream in "qkv"
                for layer in range(1, LAYERS + 1)
            }
            joined = "qkv" if queries == keys else "kv"
            out[f"AttnNode-{j}-{k}"] = own | {f"{joined}-{layer}": keys for layer in (1, 2)}
    return out


# ---- a pass


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("architecture", ["gemma2", *slow_cases("llama")])
def test_files_hold_the_rows_that_the_plan_gives_each_node(
    tiny: TinyPath, tmp_path: Path, architecture: str, symmetric: bool
) -> None:
    """States, queries, keys and values at the saved positions are the plain model's."""
    path, tokens = tiny(architecture), prompt(13)
    made = Plan.clustered(13, 2, alpha=2, m=2, symmetric=symmetric)
    cascade = recorder(path)
    cascade.forward(tokens, made)
    files, said = written(cascade.seen(), tmp_path)
    positions = {
        folder: {name: tuple(positions_of(one)) for name, one in held.items()}
        for folder, held in files.items()
    }
    assert positions == expected_files(made)
    shape = Shape.of(AutoConfig.from_pretrained(path))
    widths = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
    answers = made.beta * shape.heads * (2 + shape.head_dim)
    widths |= {"embed": WIDTH, "resid": WIDTH, "v": widths["k"], "attn": answers}
    widths |= {"kv": 2 * widths["k"], "qkv": widths["q"] + 2 * widths["k"]}
    plain, calls = PlainModel(path), plain_calls(path, tokens)
    for held in files.values():
        for name, one in held.items():
            stream, layer, *_ = name.split("-")
            assert one.info.site == Site(int(layer), stream)
            first = (
                WIDTH if (stream, layer) == ("attn", "1") else 0
            )  # the embedding stands before the first answers
            assert one.states.shape == (len(positions_of(one)), first + widths[stream])
            if stream == "attn":
                continue
            whole = (
                plain.states(tokens.tolist(), int(layer))
                if stream in ("embed", "resid")
                else torch.cat([calls[int(layer) - 1][part] for part in stream], 1)
            )
            assert torch.allclose(one.states, whole[positions_of(one)], atol=1e-4), (name, one)
    assert len(said) == len(files)
    for name, one in said.items():
        assert Path(one["file"]).stem == name.translate(str.maketrans(" ", "-", "(),"))
        held = files[Path(one["file"]).stem]
        assert one["observations"] == len(held)
        assert one["rows"] == rows_of(held)
        assert one["positions"] == sorted({p for own in held.values() for p in positions_of(own)})


def merged(parts: Sequence[Tensor], heads: int) -> Tensor:
    """The attention output, from one CompNode's partial outputs of all key shards, number by number."""
    rows, numbers = parts[0].shape[0], 2
    width = parts[0].shape[1] // heads - numbers
    out = torch.zeros(rows, heads * width, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            weights = []
            for part in parts:
                weights.append((part[row, head].double(), float(part[row, heads + head])))
            peak = max(maximum for maximum, _ in weights)
            shares = [float((maximum - peak).exp()) * total for maximum, total in weights]
            for part, share in zip(parts, shares, strict=True):
                start = numbers * heads + head * width
                mixed = part[row, start : start + width].double()
                out[row, head * width : (head + 1) * width] += share / sum(shares) * mixed
    return out


@pytest.mark.parametrize("compress", [True, *slow_cases(False)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_partial_outputs_merge_to_the_plain_models_attention(
    tiny: TinyPath, tmp_path: Path, compress: bool, symmetric: bool
) -> None:
    """The rows hold m, e and u as the facts say; shards whose keys a row does not see weigh nothing."""
    path, tokens = tiny("gemma2"), prompt(9)
    made = Plan.clustered(9, 2, alpha=3, symmetric=symmetric)
    cascade = recorder(path, compress=compress)
    cascade.forward(tokens, made)
    files, _ = written(cascade.seen(), tmp_path)
    calls = plain_calls(path, tokens)
    for i, shard in enumerate(made.shards):
        for layer in range(1, LAYERS + 1):
            one = files[f"CompNode-{i}"][f"attn-{layer}"]
            assert one.info.facts["shards"] == [list(split) for split in made.splits]
            answers = one.states[:, WIDTH:] if layer == 1 else one.states
            out = merged(answers.chunk(made.beta, 1), one.info.facts["heads"])
            assert torch.allclose(out, calls[layer - 1]["out"][list(shard)].double(), atol=1e-4)


def test_public_facts_say_where_a_file_is_from(tiny: TinyPath, tmp_path: Path) -> None:
    path = tiny("llama")
    cascade = recorder(path)
    cascade.forward(prompt(5), Plan.clustered(5, 1, alpha=2))
    seen = cascade.seen()
    files, _ = written(seen, tmp_path / "files")
    for held in files.values():
        for one in held.values():
            info = one.info
            assert (info.model, info.signature) == ("tiny/model", SIGNATURE)
            assert (info.provider_dtype, info.facts["scheme"]) == ("float32", "cascade")
    assert files["CompNode-1"]["resid-2"].info.facts["node"] == "CompNode 1"
    assert files["AttnNode-0-1"]["k-2"].info.facts["node"] == "AttnNode (0, 1)"
    facts = cascade.facts
    models: dict[int, TruncatedModel] = {
        layer: load_model(path, layer, device="cpu") for layer in (1, LAYERS)
    }
    for node in seen[:2]:
        for one in node.observations(facts.name, facts.signature, facts.dtype):
            if one.info.site.stream == "resid" and one.info.site.layer in models:
                check_observation(one, models[one.info.site.layer])


def test_the_prompt_is_the_truth_of_all_nodes(tiny: TinyPath, tmp_path: Path) -> None:
    """The truth is in a file of its own, since an observation holds no token; attacks are scored with it."""
    cascade, tokens = recorder(tiny("llama")), prompt(8)
    made = Plan.by_hand([[0, 1, 5, 7], [2, 3, 4, 6]])
    cascade.forward(tokens, made)
    written(cascade.seen(), tmp_path, tokens=tokens.tolist())
    nodes = {*(f"CompNode-{i}" for i in range(2)), *(f"AttnNode-{j}-{k}" for j in range(2) for k in range(2))}
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == nodes
    (secret,) = load_truth(tmp_path / "truth.json")
    assert secret.tokens == tuple(tokens.tolist())
    for file in tmp_path.glob("*.safetensors"):
        for one in load_observations(file):
            assert _fits(secret, one)  # or the attack command refuses to score it


def test_nodes_without_tokens_leave_no_file(tiny: TinyPath, tmp_path: Path) -> None:
    cascade = recorder(tiny("llama"))
    cascade.forward(prompt(2), Plan.clustered(2, 1, alpha=4))
    files, _ = written(cascade.seen(), tmp_path)
    comps = {name for name in files if name.startswith("CompNode")}
    assert comps == {"CompNode-0", "CompNode-1"}
    assert "AttnNode-2-3" not in files
    assert set(files["AttnNode-0-3"]) == {f"q-{layer}" for layer in range(1, LAYERS + 1)}
    assert set(files["AttnNode-3-0"]) == {"kv-1", "kv-2"} | {
        f"{s}-{layer}" for s in "kv" for layer in range(1, LAYERS + 1)
    }


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_block_that_is_not_sent_is_in_no_file(tiny: TinyPath, tmp_path: Path, symmetric: bool) -> None:
    """What is left is what nodes see of all blocks; answers that were not asked for stand as rows that see no key."""
    path, tokens = tiny("llama"), prompt(7)
    shards = [[0, 1, 2], [3, 6], [4, 5]]
    found: dict[bool, Files] = {}
    for causal in (False, True):
        cascade = recorder(path)
        cascade.forward(tokens, Plan.by_hand(shards, m=2, symmetric=symmetric, causal=causal))
        found[causal], _ = written(cascade.seen(), tmp_path / str(causal))
    made = Plan.by_hand(shards, m=2, symmetric=symmetric, causal=True)
    nodes = [node for node in made.attn_nodes if made.held_by(node)]
    assert set(found[False]) - set(found[True]) == {
        f"AttnNode-{node.queries}-{node.keys}" for node in made.attn_nodes if node not in nodes
    }
    for node in nodes:
        queries, keys = made.given(node)
        whole, held = (found[causal][f"AttnNode-{node.queries}-{node.keys}"] for causal in (False, True))
        for stream, positions in (("q", queries), ("k", keys), ("v", keys)):
            for layer in range(1, LAYERS + 1) if positions else ():
                one, every = held[f"{stream}-{layer}"], whole[f"{stream}-{layer}"]
                at = [positions_of(every).index(p) for p in positions]
                assert tuple(positions_of(one)) == positions
                assert torch.allclose(one.states, every.states[at], atol=1e-5)
    for i, shard in enumerate(made.shards):
        asked = {b.keys for n in nodes for b in made.blocks(n) if set(made.asked(b)) & set(shard)}
        for layer in range(1, LAYERS + 1):
            every, one = (found[causal][f"CompNode-{i}"][f"attn-{layer}"] for causal in (False, True))
            assert one.info.facts["shards"] == [list(made.splits[k]) for k in sorted(asked)]
            assert positions_of(one) == positions_of(every) == list(shard)
            first = WIDTH if layer == 1 else 0
            parts = every.states[:, first:].chunk(made.beta, 1)
            rows = torch.cat([every.states[:, :first], *(parts[k] for k in sorted(asked))], 1)
            assert torch.allclose(one.states, rows, atol=1e-5)


# ---- generations


@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_of_all_passes_come_together(tiny: TinyPath, tmp_path: Path, symmetric: bool) -> None:
    """A generation's rows stand in order of position, the answer's behind the prompt's; no file hides another."""
    path, tokens, new = tiny("gemma2"), prompt(6), 5
    cascade = recorder(path)
    made = Plan.clustered(6, 1, alpha=2, symmetric=symmetric)
    answer = list(generate(cascade, tokens, made, new_tokens=new))
    fed = torch.cat([tokens, torch.tensor(answer[:-1])])  # nobody computes on the last token
    files, said = written(cascade.seen(), tmp_path, tokens=[*tokens.tolist(), *answer])
    grown = Plan.clustered(6 + new - 1, 1, alpha=2, symmetric=symmetric)
    plain, calls = PlainModel(path), plain_calls(path, fed)
    for folder, expected in expected_files(grown).items():
        for name, positions in expected.items():
            stream, layer, *_ = name.split("-")
            if stream == "attn":
                continue
            one = files[folder][name]
            assert tuple(positions_of(one)) == positions
            whole = (
                plain.states(fed.tolist(), int(layer))
                if stream in ("embed", "resid")
                else torch.cat([calls[int(layer) - 1][part] for part in stream], 1)
            )
            assert torch.allclose(one.states, whole[list(positions)], atol=1e-4), (folder, name)
    for i, shard in enumerate(grown.shards):
        held = files[f"CompNode-{i}"]
        for layer in range(1, LAYERS + 1):
            before = [[p for p in split if p <= shard[-1]] for split in grown.splits]
            assert held[f"attn-{layer}"].info.facts["shards"] == before
            assert positions_of(held[f"attn-{layer}"]) == list(shard)
    (secret,) = load_truth(tmp_path / "truth.json")
    assert secret.tokens == tuple(fed.tolist())
    for one in said.values():
        assert one["rows"] == rows_of(files[Path(one["file"]).stem])


# ---- recording


def test_what_was_seen_is_taken_once_and_only_where_asked_for(tiny: TinyPath) -> None:
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(4, 1, alpha=2)
    silent = LocalCascade(model)
    silent.forward(prompt(4), made)
    assert silent.seen() == []
    cascade = LocalCascade(model, Settings(record=True))
    cascade.forward(prompt(4), made)
    assert len(cascade.seen()) == 2 + 4
    assert cascade.seen() == []
    # The hooks of a recording pass are gone with it.
    silent.forward(prompt(4), made)
    assert cascade.seen() == []


def test_requests_at_once_are_recorded_apart(tiny: TinyPath) -> None:
    """Although all nodes of a process share one model, and so its hooks."""
    path = tiny("llama")
    cascade, plain = recorder(path), PlainModel(path)
    prompts = [prompt(n, seed=n) for n in (3, 5, 6, 9)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: cascade.forward(p, Plan.clustered(len(p), 1, alpha=2)), prompts))
    requests: dict[str, list[Seen]] = {}
    for one in cascade.seen():
        requests.setdefault(one.request, []).append(one)
    assert len(requests) == 4
    lengths = []
    for nodes in requests.values():
        n = 1 + max(p for node in nodes for entry in node.entries for p in entry.positions)
        lengths.append(n)
        (tokens,) = (one for one in prompts if len(one) == n)
        for node in nodes:
            for one in node.observations("m", SIGNATURE, "float32"):
                if one.info.site.stream != "resid":
                    continue
                whole = plain.states(tokens.tolist(), one.info.site.layer)
                assert torch.allclose(one.states, whole[positions_of(one)], atol=1e-4)
    assert sorted(lengths) == [3, 5, 6, 9]


# ---- a site of a file


def test_a_site_is_chosen_from_a_nodes_file(tiny: TinyPath, tmp_path: Path) -> None:
    cascade = recorder(tiny("llama"))
    cascade.forward(prompt(5), Plan.clustered(5, 1, alpha=2))
    written(cascade.seen(), tmp_path)
    comp, attn = tmp_path / "CompNode-1.safetensors", tmp_path / "AttnNode-0-0.safetensors"
    assert [one.info.site for one in load_site(comp, 1)] == [Site(1, "resid")]  # as attacks take it
    assert [one.info.site for one in load_site(comp, 1, "attn")] == [Site(1, "attn")]
    assert [one.info.site for one in load_site(comp, None, "embed")] == [Site(0, "embed")]
    assert [one.info.site for one in load_site(attn, 2, "qkv")] == [Site(2, "qkv")]
    for path, layer, stream in ((comp, None, None), (comp, None, "attn"), (comp, 99, None), (attn, 1, None)):
        with pytest.raises(InputError, match=r"choose one by --layer and --stream: .* at "):
            load_site(path, layer, stream)
    with pytest.raises(InputError, match=f"resid at 1 to {LAYERS}"):
        load_site(comp)
    one = tmp_path / "one.safetensors"
    save_observation(load_site(comp, 1)[0], one)
    assert [found.info.site for found in load_site(one, 7, "v")] == [
        Site(1, "resid")
    ]  # checked with the model


# ---- positions in files


def rewritten(path: Path, changes: Mapping[str, Any]) -> Path:
    """The file with other public facts."""
    with safe_open(path, framework="pt") as file:
        data = json.loads(file.metadata()["hiddenlab"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    data["observations"][0] |= changes
    save_file(tensors, path, metadata={"hiddenlab": json.dumps(data)})
    return path


@pytest.fixture(scope="module")
def node_file(tiny: TinyPath, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of the positions 0, 2 and 4; tests change copies of it."""
    folder = tmp_path_factory.mktemp("node")
    cascade = recorder(tiny("llama"))
    cascade.forward(prompt(5), Plan.clustered(5, 1, alpha=2))
    files, _ = written(cascade.seen(), folder)
    save_observation(files["CompNode-0"]["resid-1"], folder / "resid-1.safetensors")
    return folder / "resid-1.safetensors"


@pytest.fixture
def saved(node_file: Path, tmp_path: Path) -> Path:
    """A copy of the file that the test may change."""
    return Path(shutil.copy(node_file, tmp_path))


@pytest.mark.parametrize(
    "positions",
    [[4, 2, 0], [0, 0, 2], [-1, 0, 2], [0.0, 1, 2], [0, 1, True], ["0", "1", "2"], "012", 3, {"0": 1}],
    ids=str,
)
def test_bad_positions_are_refused(saved: Path, positions: Any) -> None:
    with pytest.raises(InputError, match=r"observations\[0\].positions.* should"):
        load_observation(rewritten(saved, {"positions": positions}))


@pytest.mark.parametrize("positions", [[], [0, 2], [0, 2, 4, 6]], ids=str)
def test_positions_of_another_number_of_rows_are_refused(saved: Path, positions: list[int]) -> None:
    with pytest.raises(InputError, match=f"3 rows, but {len(positions)} positions"):
        load_observation(rewritten(saved, {"positions": positions}))


def test_no_positions_means_all(saved: Path) -> None:
    assert load_observation(saved).info.positions == (0, 2, 4)
    assert load_observation(rewritten(saved, {"positions": None})).info.positions is None
    with pytest.raises(InputError, match="unknown stream 'queries'"):
        load_observation(rewritten(saved, {"site": {"layer": 1, "stream": "queries"}}))
