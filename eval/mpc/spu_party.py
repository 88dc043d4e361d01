"""Run one party of SPU in SPU's own environment, and print one JSON line; ``eval/mpc/run.py`` starts it.

The input is secret, weights are public. Bytes are those that SPU's own profile reports for this party.
"""

import base64
import json
import sys
import time

import bert_layer as bert
import jax.numpy as jnp
import numpy as np
import spu.utils.frontend as frontend
from spu import libspu
from spu.api import Io, Runtime

NAMES = sorted(bert.layer_weights(2, 2, 0))
PROTOCOLS = {"aby3": libspu.ProtocolKind.ABY3, "semi2k": libspu.ProtocolKind.SEMI2K}


def main(job: dict, rank: int) -> None:
    config = libspu.RuntimeConfig(PROTOCOLS[job["protocol"]], libspu.FieldType.FM64, 18)
    config.enable_pphlo_profile = True
    config.max_concurrency = job["threads"]
    parties = job["ports"]
    description = libspu.link.Desc()
    for i, port in enumerate(parties):
        description.add_party(f"party{i}", f"127.0.0.1:{port}")
    link = libspu.link.create_brpc(description, rank)
    io, runtime = Io(len(parties), config), Runtime(link, config)
    weights = [bert.layer_weights(job["width"], job["inner"], job["seed"] + i) for i in range(job["layers"])]
    flat = [w[name] for w in weights for name in NAMES]
    plain = bert.inputs(job["tokens"], job["width"], job["seed"])

    def run(x, *tensors):
        for i in range(job["layers"]):
            own = dict(zip(NAMES, tensors[i * len(NAMES) : (i + 1) * len(NAMES)], strict=True))
            x = layer(x, own, job["heads"], job["variant"])
        return x

    names = [f"in{i}" for i in range(1 + len(flat))]
    visibilities = [libspu.Visibility.VIS_SECRET] + [libspu.Visibility.VIS_PUBLIC] * len(flat)
    executable, _ = frontend.compile(
        frontend.Kind.JAX,
        run,
        [plain, *flat],
        {},
        names,
        visibilities,
        lambda outputs: [f"out{i}" for i in range(len(outputs))],
    )
    input_share = share(io, link, rank, plain, len(parties))
    for name, value, visibility in zip(names, [plain, *flat], visibilities, strict=True):
        info = visibility == libspu.Visibility.VIS_PUBLIC
        runtime.set_var(name, io.make_shares(value, visibility)[rank] if info else input_share)
    result: dict = {"seconds": []}
    for _ in range(job["repeats"]):
        link.barrier()
        started = time.perf_counter()
        runtime.run(executable)
        result["seconds"].append(time.perf_counter() - started)
    output_share = runtime.get_var(executable.output_names[0])
    packed = [json.loads(text) for text in link.all_gather(json.dumps(pack(output_share)))]
    output = io.reconstruct([unpack(part) for part in packed])
    result |= bert.errors(output, job)
    print("RESULT " + json.dumps(result), flush=True)
    link.stop_link()


def share(io, link, rank, value, parties):
    """Split the input into shares at its owner (rank 0), send them, and return this party's share."""
    texts = [""] * parties
    if rank == 0:
        texts = [json.dumps(pack(part)) for part in io.make_shares(value, libspu.Visibility.VIS_SECRET)]
    return unpack(json.loads(link.scatter(texts, 0)))


def pack(part):
    return {
        "meta": base64.b64encode(part.meta).decode(),
        "chunks": [base64.b64encode(c).decode() for c in part.share_chunks],
    }


def unpack(data):
    part = libspu.Share()
    part.meta = base64.b64decode(data["meta"])
    part.share_chunks = [base64.b64decode(c) for c in data["chunks"]]
    return part


def layer(x, w, heads, variant):
    q, k, v = (split(x @ w[f"{n}.w"] + w[f"{n}.b"], heads) for n in "qkv")
    chances = SOFTMAX[variant](q @ k.transpose(0, 2, 1) * (q.shape[-1] ** -0.5))
    mixed = (chances @ v).transpose(1, 0, 2).reshape(x.shape)
    x = norm(x + mixed @ w["o.w"] + w["o.b"], w, "norm1")
    inner = ACTIVATION[variant](x @ w["up.w"] + w["up.b"])
    return norm(x + inner @ w["down.w"] + w["down.b"], w, "norm2")


def split(x, heads):
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


def norm(x, w, name):
    x = x - x.mean(-1, keepdims=True)
    variance = (x * x).mean(-1, keepdims=True)
    return x / jnp.sqrt(variance + 1e-6) * w[f"{name}.w"] + w[f"{name}.b"]


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def two_quad(x):
    s = (x + bert.TWO_QUAD_SHIFT) ** 2
    return s / s.sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def quad(x):
    return 0.125 * x * x + 0.25 * x + 0.5


def puma(x):
    a, b, c = bert.PUMA_BORDERS
    low, high = bert.puma_polynomials(x, jnp.square)
    below_a, below_b, above_c = x < a, x < b, x > c
    return (below_b ^ below_a) * low + (~below_b & ~above_c) * high + above_c * x


SOFTMAX = {"2quad": two_quad, "puma": softmax, "exact": softmax}
ACTIVATION = {"2quad": quad, "puma": puma, "exact": gelu}


if __name__ == "__main__":
    bert.end_with_parent()
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
