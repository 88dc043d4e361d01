"""Run one party of CrypTen in CrypTen's own environment, and print one JSON line; ``eval/mpc/run.py`` starts it.

CrypTen's triples come from a trusted first party, so there is no offline traffic to count.
"""

import json
import os
import sys
import time
import types

# CrypTen 0.4.1 imports a module that torch no longer has, but only looks up a name in it.
_stub = types.ModuleType("torch.onnx._internal.registration")
_stub.registry = None  # type: ignore[attr-defined]
sys.modules["torch.onnx._internal.registration"] = _stub

import bert_layer as bert  # noqa: E402
import crypten  # noqa: E402
import crypten.communicator as comm  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from crypten.config import cfg  # noqa: E402


def main(job: dict) -> None:
    torch.set_num_threads(job["threads"])
    crypten.init()
    cfg.communicator.verbose = True
    if job.get("decoder"):
        decoder(job)
        return
    layers = [
        {
            k: torch.tensor(v)
            for k, v in bert.layer_weights(job["width"], job["inner"], job["seed"] + i).items()
        }
        for i in range(job["layers"])
    ]
    plain = bert.inputs(job["tokens"], job["width"], job["seed"])
    result = {"seconds": [], "bytes": [], "rounds": []}
    for _ in range(job["repeats"]):
        x = crypten.cryptensor(torch.tensor(plain), src=0)
        comm.get().barrier()
        comm.get().reset_communication_stats()
        started = time.perf_counter()
        for weights in layers:
            x = layer(x, weights, job["heads"], job["variant"])
        result["seconds"].append(time.perf_counter() - started)
        stats = comm.get().get_communication_stats()
        result["bytes"].append(stats["bytes"])
        result["rounds"].append(stats["rounds"])
    result |= bert.errors(revealed(x).numpy(), job)
    if job["embedding"]:
        result["embedding"] = embedding(job)
    print("RESULT " + json.dumps(result), flush=True)


def revealed(x):
    """Reveal the numbers of shares.

    CrypTen's own decoder is off by one for some negative numbers near whole ones.
    """
    return x.reveal().double() / x.encoder.scale


def layer(x, w, heads, variant):
    """Compute a layer on shares, with public weights."""
    q, k, v = (split(x.matmul(w[f"{n}.w"]) + w[f"{n}.b"], heads) for n in "qkv")
    scores = q.matmul(k.transpose(1, 2)) * (q.size(2) ** -0.5)
    chances = two_quad(scores) if variant == "2quad" else scores.softmax(-1)
    mixed = chances.matmul(v).transpose(0, 1).reshape(x.size(0), x.size(1))
    x = norm(x + mixed.matmul(w["o.w"]) + w["o.b"], w["norm1.w"], w["norm1.b"])
    inner = ACTIVATION[variant](x.matmul(w["up.w"]) + w["up.b"])
    return norm(x + inner.matmul(w["down.w"]) + w["down.b"], w["norm2.w"], w["norm2.b"])


def split(x, heads):
    return x.reshape(x.size(0), heads, x.size(1) // heads).transpose(0, 1)


def norm(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True)
    return x * (variance + bert.EPS).inv_sqrt() * weight + bias


def two_quad(x):
    s = (x + bert.TWO_QUAD_SHIFT).square()
    # Newton's reciprocal converges near 1 only, so scale the mean to about 1 before inverting it.
    mean = s.mean(-1, keepdim=True) * (1 / bert.TWO_QUAD_SHIFT**2)
    return s * (mean.reciprocal() * (1 / (x.size(-1) * bert.TWO_QUAD_SHIFT**2)))


def quad(x):
    return x.square() * 0.125 + x * 0.25 + 0.5


def gelu(x):
    inner = (x + x * x.square() * 0.044715) * (2 / np.pi) ** 0.5
    return x * (inner.tanh() + 1) * 0.5


def puma(x):
    a, b, c = bert.PUMA_BORDERS
    low, high = bert.puma_polynomials(x, lambda t: t.square())
    below_a, below_b, above_c = x < a, x < b, x > c
    return (below_b - below_a) * low + (1 - below_b - above_c) * high + above_c * x


def decoder(job):
    """Run the first layers of a Llama-type decoder on shares; each party writes its own share of the states.

    ``job["decoder"]`` is a file with the weights, the rotary tables and the input vectors. Norms divide by public
    scales first: CrypTen's inverse square root is accurate for numbers near 1 only.
    """
    with np.load(job["decoder"], allow_pickle=False) as file:
        t = {name: torch.tensor(file[name]) for name in file.files}
    x = crypten.cryptensor(t["x"], src=0)
    hidden = torch.full((len(t["x"]),) * 2, -200.0).triu(1)
    comm.get().barrier()
    comm.get().reset_communication_stats()
    started = time.perf_counter()
    for i in range(job["layers"]):
        x = decoder_layer(
            x,
            {name.partition(".")[2]: v for name, v in t.items() if name.startswith(f"{i}.")},
            t,
            hidden,
            job,
        )
    seconds = time.perf_counter() - started
    stats = comm.get().get_communication_stats()
    np.save(f"{job['out']}{comm.get().get_rank()}.npy", x.share.numpy())
    print(
        "RESULT "
        + json.dumps({"seconds": [seconds], "bytes": [stats["bytes"]], "rounds": [stats["rounds"]]}),
        flush=True,
    )


def decoder_layer(x, w, t, hidden, job):
    heads, groups = job["heads"], job["heads"] // job["kv_heads"]
    normed = rms_norm(x, w["norm1"], w["scale1"], job["eps"])
    q, k, v = (
        split(normed.matmul(w[n]), n_heads)
        for n, n_heads in (("q", heads), ("k", heads // groups), ("v", heads // groups))
    )
    q, k = (rotate(a, t["cos"], t["sin"]) for a in (q, k))
    if groups > 1:
        k, v = (crypten.stack([a] * groups, 1).reshape(heads, a.size(1), a.size(2)) for a in (k, v))
    scores = q.matmul(k.transpose(1, 2)) * (q.size(2) ** -0.5) + hidden
    mixed = scores.softmax(-1).matmul(v).transpose(0, 1).reshape(x.size(0), -1)
    x = x + mixed.matmul(w["o"])
    normed = rms_norm(x, w["norm2"], w["scale2"], job["eps"])
    gate = normed.matmul(w["gate"])
    return x + (gate * gate.sigmoid() * normed.matmul(w["up"])).matmul(w["down"])


def rms_norm(x, weight, scale, eps):
    x = x * float(scale)
    return x * (x.square().mean(-1, keepdim=True) + eps * float(scale) ** 2).inv_sqrt() * weight


def rotate(x, cos, sin):
    half = x.size(2) // 2
    turned = crypten.cat([-x[:, :, half:], x[:, :, :half]], 2)
    return x * cos + turned * sin


ACTIVATION = {"2quad": quad, "puma": puma, "exact": gelu}


def embedding(job):
    """Measure the lookup of tokens by one-hot rows and a public table, separately from the layers."""
    ids = torch.arange(job["tokens"]) * 7 % job["vocabulary"]
    hot = torch.nn.functional.one_hot(ids, job["vocabulary"]).float()
    table = torch.randn(job["vocabulary"], job["width"], generator=torch.Generator().manual_seed(0))
    comm.get().reset_communication_stats()
    started = time.perf_counter()
    product = crypten.cryptensor(hot, src=0).matmul(table)
    seconds = time.perf_counter() - started
    stats = comm.get().get_communication_stats()
    error = float((revealed(product) - table[ids]).abs().max())
    return {"seconds": seconds, "bytes": stats["bytes"], "error": error}


def end():
    """Leave without the interpreter's own shutdown, in which gloo's threads sometimes abort the process."""
    comm.get().barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    bert.end_with_parent()
    main(json.loads(sys.argv[1]))
    end()
