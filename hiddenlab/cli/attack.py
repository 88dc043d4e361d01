"""``hiddenlab attack``: recover prompts from hidden states."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from hiddenlab.cli import options as o
from hiddenlab.cli.console import bars, only_json, print_json, stderr, stdout
from hiddenlab.errors import InputError
from hiddenlab.records import Recorder, RunRecord, check_new
from hiddenlab.summary import Sample, advice
from hiddenlab.utils.schema import LARGEST

if TYPE_CHECKING:
    from hiddenlab.job import AttackSpec

JSON_FORMAT = 1


def attack(
    prompt: o.PromptArg = None,
    prompts: o.PromptsOpt = None,
    column: o.ColumnOpt = None,
    limit: o.LimitOpt = None,
    max_tokens: o.MaxTokensOpt = None,
    observation: Annotated[
        str | None,
        Option("--observation", metavar="FILE", help="Attack saved states; see 'hiddenlab capture'."),
    ] = None,
    truth: Annotated[
        str | None,
        Option(
            "--truth", metavar="FILE", help="Score against 'capture --truth FILE'; the attack never sees it."
        ),
    ] = None,
    model: o.ModelOpt = None,
    layer: o.LayerOpt = None,
    stream: o.StreamOpt = None,
    defense: o.DefenseOpt = None,
    attack: Annotated[
        str, Option("--attack", metavar="NAME", help="See 'hiddenlab list attacks'.")
    ] = "vocab-match",
    search: Annotated[Literal["speculative", "greedy"] | None, Option(help="Default: speculative.")] = None,
    proposal: Annotated[
        Literal["probe+lm", "probe", "lm", "vocab"] | None, Option(help="Default: probe+lm.")
    ] = None,
    distance: Annotated[
        Literal["auto", "l1", "l2", "sorted-l1", "sorted-l2"] | None,
        Option(help="Default: auto, by the channel."),
    ] = None,
    epsilon: Annotated[
        str | None,
        Option(metavar="auto|calibrated|NUMBER", help="When a distance is a match. Default: auto."),
    ] = None,
    budget: Annotated[
        int | None,
        Option(metavar="N", min=1, max=LARGEST, help="Candidates a token at most; default: no cap."),
    ] = None,
    batch: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            max=LARGEST,
            help="Prompts attacked at once, and recorded together; default: the attack's own.",
        ),
    ] = None,
    seed: o.SeedOpt = 0,
    device: o.DeviceOpt = "auto",
    device_map: o.DeviceMapOpt = None,
    dtype: o.DtypeOpt = "float32",
    threads: o.ThreadsOpt = None,
    out: o.OutOpt = None,
    runs_dir: o.RunsDirOpt = Path("runs"),
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Recover prompts from the hidden states of a model, raw or behind defenses."""
    _check_combinations(prompt, prompts, column, max_tokens, observation, truth, defense, out, no_record)
    from hiddenlab.job import AttackSpec

    spec = AttackSpec(
        attack=attack, prompt=prompt, prompts=prompts, column=column, limit=limit, max_tokens=max_tokens,
        observation=observation, truth=truth, model=model, layer=layer, stream=stream,
        defense=tuple(defense or ()), search=search, proposal=proposal, distance=distance, epsilon=epsilon,
        budget=budget, batch=batch, seed=seed, device=device, device_map=device_map, dtype=dtype,
        threads=threads,
    )  # fmt: skip
    recorder = conduct(with_stdin(spec), out=out, runs_dir=runs_dir, keep=not no_record, json=json)
    if json:
        print_json(payload(recorder))


def conduct(
    spec: "AttackSpec",
    *,
    out: Path | None = None,
    runs_dir: Path = Path("runs"),
    keep: bool = True,
    json: bool = False,
    resume: Path | None = None,
) -> Recorder:
    """Run a spec, showing it unless ``json``; with ``resume``, continue the run in that directory.

    Raises:
        HiddenlabError: see ``prepare`` and ``run_attack``. typer.Exit: it was interrupted.
    """
    from hiddenlab.cli.show import sample_line, summary_table, title
    from hiddenlab.job import prepare
    from hiddenlab.runner import run_attack

    recorder: Recorder | None = None
    screen = stdout()

    try:
        with only_json(json), bars() as progress:

            def show(sample: Sample) -> None:
                if not json:
                    with progress.aside():
                        screen.print(sample_line(sample), soft_wrap=True)

            job = prepare(spec, progress)
            if resume is None:
                record = RunRecord(
                    verb="attack",
                    spec=job.spec.to_json(),
                    seeds={"seed": spec.seed},
                    inputs_sha256=job.inputs_sha256,
                    prompts=len(job.cases),
                )
                recorder = Recorder.create(record, out=out, runs_dir=runs_dir, keep=keep)
            else:
                recorder = Recorder.resume(resume, job.inputs_sha256)
            summary = run_attack(job, recorder, progress=progress, show=show)
    except KeyboardInterrupt:
        _say_interrupted(recorder)
        raise typer.Exit(130) from None
    if not json:
        screen.print(title(job.spec.to_json()), soft_wrap=True)
        screen.print(summary_table(summary))
        for line in advice(recorder.samples):
            screen.print(line, style="yellow", soft_wrap=True, markup=False, highlight=False)
    if recorder.path is not None:
        stderr().print(f"recorded in {recorder.path}", soft_wrap=True)
    return recorder


def payload(recorder: Recorder) -> dict[str, Any]:
    """What ``--json`` prints."""
    record = recorder.record
    return {
        "format": JSON_FORMAT,
        "spec": record.spec,
        "summary": record.summary,
        "samples": recorder.samples,
    }


def with_stdin(spec: "AttackSpec") -> "AttackSpec":
    """Take a prompt on standard input into the spec, so that the run can be repeated."""
    if "-" not in (spec.prompt, spec.prompts):
        return spec
    from hiddenlab.prompts import load_prompts

    return replace(spec, prompt=load_prompts("-")[0].text, prompts=None)


def _check_combinations(
    prompt: str | None,
    prompts: str | None,
    column: str | None,
    max_tokens: int | None,
    observation: str | None,
    truth: str | None,
    defense: list[str] | None,
    out: Path | None,
    no_record: bool,
) -> None:
    if prompt is not None and prompts is not None:
        raise InputError("give a PROMPT or --prompts, not both")
    if prompt is not None and column is not None:
        raise InputError("--column goes with --prompts; a PROMPT has no columns")
    if observation is not None:
        given = {"a PROMPT": prompt, "--prompts": prompts, "--max-tokens": max_tokens, "--defense": defense}
        if strange := [name for name, value in given.items() if value]:
            raise InputError(f"--observation brings its own states; leave out {', '.join(strange)}")
    elif truth is not None:
        raise InputError("--truth goes with --observation; without it the prompts themselves are the truth")
    if out is not None and no_record:
        raise InputError(
            "--out names a directory for the record, and --no-record asks for none; give one of them"
        )
    if out is not None:
        check_new(out)


def _say_interrupted(recorder: Recorder | None) -> None:
    if recorder is None or recorder.path is None:
        stderr().print("interrupted; nothing was recorded")
        return
    record = recorder.record
    stderr().print(
        f"interrupted; {len(recorder.samples)} of {record.prompts} prompts are recorded. Continue with: "
        f"hiddenlab rerun {recorder.path} --resume",
        soft_wrap=True,
    )
