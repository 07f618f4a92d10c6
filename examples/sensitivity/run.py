"""Sensitivity run: every layer is measured alone, then a list is chosen and judged."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

from examples.atomic_write import write_atomically
from examples.perplexity import log_perplexity_difference, mean_interval, perplexity
from examples.sensitivity import display
from examples.sensitivity.budget import Budget
from examples.sensitivity.choose import (
    check_budget,
    fewest,
    most_sensitive,
    within_bits,
    worth_their_bytes,
)
from examples.sensitivity.deviation import Deviation, measure
from examples.sensitivity.fake_quantize import fake_quantised, quantise_weights
from examples.sensitivity.groups import Group, bits_per_weight, linears_of
from examples.sensitivity.plot import plot
from examples.sensitivity.results import GroupResult, Results, Whole
from examples.sensitivity.subject import Subject
from examples.versions import commit, installed, machine
from nvfp4_kernels.formats.scale_search import SCALE_RULES, ScaleRule

DISTRIBUTIONS = ("vllm-fp4-plugin", "torch", "transformers")
# An ignore list is chosen on even windows and judged on odd windows, so that overfitting does not
# look like a gain.
CHOOSING, JUDGING = slice(0, None, 2), slice(1, None, 2)


def run(
    subject: Subject,
    scales: str,
    input_terms: Sequence[int],
    budget: Budget,
    windows_at_once: int,
    options: Mapping[str, Any],
    device: str,
    out: Path,
) -> Results:
    """Measure, choose, show, and write ``ignore.txt``, ``results.json`` and ``sensitivity.png``.

    Args:
        subject: the model, with the text for the measurement.
        scales: the rule of the block scales to measure.
        input_terms: numbers of NVFP4 terms of the inputs, 0 for inputs in 16 bits; the first number
            decides the list, and the others are also measured.
        budget: budget of the list.
        windows_at_once: number of windows in one batch.
        options: options of the command, for the record.
        device: name of the device, for the record.
        out: folder to write to, made when missing.

    Raises:
        ValueError: there is no such rule, or no list fits the budget.
    """
    if scales not in SCALE_RULES:
        raise ValueError(f"scales: is {scales!r}, must be one of {', '.join(SCALE_RULES)}")
    check_budget(subject.groups, budget)
    rule = cast(ScaleRule, scales)
    groups, names = subject.groups, linears_of(subject.groups)
    with display.progress("weights", len(names)) as advance:
        weights, errors = quantise_weights(subject.model, names, rule, advance)

    own, *others = input_terms

    def deviations(
        title: str, variants: Mapping[str, Sequence[str]], terms: int = own
    ) -> dict[str, Deviation]:
        def quantised(linears: Sequence[str]) -> AbstractContextManager[None]:
            scales = subject.input_scales if terms else {}
            return fake_quantised(subject.model, linears, weights, scales, terms)

        batches = -(-len(subject.windows) // windows_at_once)
        with display.progress(title, batches * len(variants)) as advance:
            return measure(subject, quantised, variants, windows_at_once, advance)

    @cache
    def without(ignored: tuple[Group, ...]) -> Deviation:
        left = [name for group in groups if group not in ignored for name in group.linears]
        title = f"all but {len(ignored)}" if ignored else "all layers"
        return deviations(title, {"": left})[""]

    layers = {group.name: group.linears for group in groups}
    alone = deviations("each layer alone", layers)
    with_terms = {
        terms: deviations(f"inputs of {terms} terms", {**layers, "": names}, terms)
        for terms in others
    }
    kl = {name: _choosing_kl(deviation) for name, deviation in alone.items()}
    ignored = _choose(groups, kl, budget, lambda some: _choosing_kl(without(tuple(some))))
    whole = without(()).of_windows(JUDGING)
    with_list = without(tuple(ignored)).of_windows(JUDGING)

    results = Results(
        about={
            "model": subject.name,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": {n: str(v) if isinstance(v, Path) else v for n, v in options.items()},
            "device": device,
            "machine": machine(),
            "versions": installed(*DISTRIBUTIONS),
            "commit": commit(),
        },
        perplexity=perplexity(whole.reference),
        tokens=whole.reference.size,
        rule=rule,
        groups=[
            GroupResult(
                group,
                _relative([errors[name] for name in group.linears]),
                alone[group.name].kl,
                alone[group.name].log_perplexity,
                group in ignored,
                {terms: found[group.name].kl for terms, found in with_terms.items()},
            )
            for group in groups
        ],
        quantised=_whole(whole, groups, []),
        quantised_with_terms={
            terms: _whole(found[""].of_windows(JUDGING), groups, [])
            for terms, found in with_terms.items()
        },
        with_list=_whole(with_list, groups, ignored),
        kl_won=mean_interval((whole.divergence - with_list.divergence).mean(axis=1)),
        log_perplexity_won=log_perplexity_difference(whole.logprobs, with_list.logprobs),
    )
    out.mkdir(parents=True, exist_ok=True)
    listed = [name for row in results.ignored for name in row.group.linears]
    write_atomically(out / "ignore.txt", "".join(f"{name}\n" for name in listed))
    write_atomically(out / "results.json", json.dumps(results.as_json(), indent=2) + "\n")
    plot(results, out / "sensitivity.png")
    display.results(results)
    return results


def _choose(
    groups: Sequence[Group],
    kl: dict[str, float],
    budget: Budget,
    kl_without: Callable[[Sequence[Group]], float],
) -> list[Group]:
    if budget.max_ignored is not None:
        return most_sensitive(groups, kl, budget.max_ignored)
    ranked = worth_their_bytes(groups, kl)
    if budget.keep_bits is not None:
        return within_bits(ranked, budget.keep_bits)
    assert budget.win_back is not None
    most = (1 - budget.win_back) * kl_without([])
    count = fewest(len(groups), lambda n: kl_without(ranked[:n]) <= most)
    if count == len(groups):
        raise ValueError(
            f"win_back: {budget.win_back:g} of the divergence comes back only with every layer in "
            "16 bits; lower --win-back"
        )
    return ranked[:count]


def _choosing_kl(deviation: Deviation) -> float:
    return float(deviation.divergence[CHOOSING].mean())


def _relative(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    energy = sum(error["energy"] for error in errors)
    return {rule: sum(e[rule] for e in errors) / energy if energy else 0.0 for rule in SCALE_RULES}


def _whole(deviation: Deviation, groups: Sequence[Group], ignored: Sequence[Group]) -> Whole:
    nbytes = sum(g.quantised_bytes for g in groups) + sum(g.extra_bytes for g in ignored)
    return Whole.of(deviation, bits_per_weight(groups, ignored), nbytes)
