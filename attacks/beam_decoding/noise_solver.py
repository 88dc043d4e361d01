"""Rows in unknown order behind noise: which row can follow, once the noise on its embedding is solved for.

Noise as strong as embeddings differ drowns what distances say of an order: rows are moved further by it than by the
tokens before them. But it is the noise of one embedding. Behind the right tokens a row is explained by noise as strong
as the channel's; behind others the deeper layers leave a residual that no noise before them explains. So the likeliest
continuations are solved for (``continuous``), and what each costs counts as one more piece of evidence. The prompt is
continued with the noised embedding that was found, not with the token's own.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.beam_decoding.embedding_inversion import UNEXPLAINED, newton
from hiddenlab.attacks.beam_decoding.features import NOISE, Candidates, Rows
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.models.request import packs

DESCENTS = 4  # steps for each candidate


def explain(
    asked: Sequence[tuple[Prefix, Rows, Candidates]], model: TruncatedModel, matcher: Matcher, sigma: float
) -> tuple[list[Float[Tensor, "c d"]], int]:
    """Solve for the noised embedding of each candidate behind its prefix, and fill in what that says for it.

    Args:
        asked: candidates that each have a row, what they stand behind, and the rows. sigma: of the noise on each
            coordinate of an embedding.

    Returns:
        For each prefix, the embeddings of its candidates that explain their rows best; and positions run a candidate.
    """
    out, before = list[Tensor](), model.evaluated_tokens
    for group in packs(asked, lambda one: len(one[2]), model.max_pass_tokens):
        sizes = [len(candidates) for _, _, candidates in group]
        with torch.inference_mode(False):  # copies, as autograd takes no tensors of inference mode
            centre = model.embed(torch.cat([one.tokens for _, _, one in group])).float().clone()
            observed = torch.cat([view.shown[one.rows] for _, view, one in group]).float().clone()
            # Of a row's own length: attention sinks are far longer than other rows, and lie further off.
            tau = UNEXPLAINED / observed.shape[1] ** 0.5 * observed.norm(dim=1, keepdim=True).clamp(min=1e-12)
            noise, cost = torch.zeros_like(centre), centre[:, 0]

            def states(points: Tensor, grad: bool, group: list = group, sizes: list[int] = sizes) -> Tensor:
                requests = [
                    Request(prefix, points[:0], branches=part)
                    for (prefix, _, _), part in zip(group, points.to(model.dtype).split(sizes), strict=True)
                ]
                answers = model.run(requests, keep=False, grad=grad)
                return torch.cat([matcher.view(answer.branches) for answer in answers])

            for _ in range(DESCENTS):
                noise, cost = newton(states, centre, sigma, noise, observed, tau)
        costs = (cost / centre.shape[1]).log().split(sizes)
        for (_, _, candidates), told in zip(group, costs, strict=True):
            candidates.features[:, NOISE] = told
        out += (centre + sigma * noise).split(sizes)
    return out, (model.evaluated_tokens - before) // max(1, sum(map(len, out)))


def append(noised: Sequence[tuple[Prefix, Float[Tensor, " d"]]]) -> None:
    """Continue each prefix, all of them of one truncated model, with a noised embedding."""
    if not noised:
        return
    model = noised[0][0].model
    requests = [Request(prefix, embedding[None].to(model.dtype)) for prefix, embedding in noised]
    for (prefix, _), answer in zip(noised, model.run_all(requests, together=True), strict=True):
        prefix.keep(answer, tokens=1)
