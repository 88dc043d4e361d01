"""Show three attacks on the built-in model, and explain each (``hiddenlab demo``)."""

from dataclasses import dataclass

from hiddenlab import options as o
from hiddenlab.cli.attack import showing
from hiddenlab.cli.console import stdout
from hiddenlab.config import AttackConfig

LAYER = 6


@dataclass(frozen=True)
class Act:
    """One attack of the demonstration.

    Attributes:
        title: what it shows. before: what is released, and what the attacker does. after: what the result means.
        prompt: the text that is attacked. defense: as in ``AttackConfig``.
    """

    title: str
    before: str
    after: str
    prompt: str
    defense: tuple[str, ...] = ()


ACTS = (
    Act(
        "1. Hidden states are the prompt",
        "A model turns every token into a vector at every layer, its hidden state. Some services show such states to "
        "others: to split the work, to check it, to cache it. Here a provider releases the states after layer 6 of "
        "30. The attacker has the model's public weights. He guesses each token, runs the guess through the same "
        "layers, and compares.",
        "A token is verified when its state, computed again from the open weights, fits the released one.",
        "My password is hunter2, please do not tell anyone.",
    ),
    Act(
        "2. Shuffled states are the prompt, too",
        "Now the provider releases the states in a random order, and hides the order. The attacker looks for the first "
        "token: it fits exactly one of the states. Then he looks for the second one behind it, and so on.",
        "A state depends on all tokens before it. So a wrong order would not fit, and shuffling hides nothing.",
        "Transfer 4,000 euros to Anna Berger by Friday.",
        ("seq-perm",),
    ),
    Act(
        "3. A little noise does not help",
        "Now the provider adds Gaussian noise to the input of the model (standard deviation 0.01, 7 % of that of the "
        "embeddings), and computes on. No guess fits exactly any more. But the right one is still nearer than the "
        "others, and the attacker measures beforehand how near is near enough.",
        "Stronger noise hides more, and ruins the model's answers: 'hiddenlab eval noise-utility' measures both.",
        "The merger with Hartmann will be announced on March 3.",
        ("gaussian:sigma=0.01",),
    ),
)
NEXT = """What next:
  hiddenlab attack "YOUR TEXT" --layer 6       attack a prompt of your own
  hiddenlab list defenses                      what else a provider can do to states
  hiddenlab compare --defense seq-perm --defense gaussian:sigma=0.1 --limit 5
  hiddenlab attack --states FILE               states that you saved with another program
Use it on prompts that are yours, or that were given to you for this purpose."""


def demo(threads: o.ThreadsOpt = None) -> None:
    """Show three attacks on the built-in model, and explain each; about a minute, nothing is recorded."""
    from hiddenlab.cli.show import sample_line
    from hiddenlab.runner import run
    from hiddenlab.summary import conclusion

    screen = stdout()
    for act in ACTS:
        screen.print(f"\n{act.title}", style="bold")
        screen.print(act.before)
        screen.print(f"\n  the prompt:    {act.prompt}", soft_wrap=True)
        config = AttackConfig(prompt=act.prompt, layer=LAYER, defense=act.defense, threads=threads)
        with showing(json=False) as (progress, _):
            made = run(config.checked(), keep=False, progress=progress)
        sample = made.samples[0]
        screen.print("  the attacker:  ", end="")
        screen.print(sample_line({**sample, "id": ""}), soft_wrap=True)
        seconds, runs = sample["seconds"], sample["evaluated_tokens"]
        screen.print(f"  {conclusion(made.samples)} {seconds:.1f} s, {runs} tokens run through the model.\n")
        screen.print(act.after)
    screen.print(f"\n{NEXT}", soft_wrap=True)
