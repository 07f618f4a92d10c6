"""Markdown page of a soak test's results."""

from examples.soak.memory import WARM_UP, growth
from examples.soak.results import MEGABYTE, Results
from examples.soak.traffic import ERROR, EXPECTED, LOST, WRONG


def markdown(results: Results) -> str:
    """Markdown page: model and machine, then the results."""
    return "\n".join(
        [*_head(results), *_requests(results), *_rest(results), *_verdict(results), ""]
    )


def _head(results: Results) -> list[str]:
    about = results.about
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return [
        "# A server under load for long",
        "",
        f"`{about['command']}`",
        "",
        f"Commit {about['commit'] or 'unknown'}, {about['started'][:10]}. Machine: "
        f"{about['device']}; {about['machine']['cpu']}; {versions}.",
        "",
    ]


def _requests(results: Results) -> list[str]:
    total, tokens = len(results.outcomes), sum(o.tokens for o in results.outcomes)
    lines = [
        "## Requests",
        "",
        f"{total:,} in {results.seconds:,.0f} s, {results.about['settings']['at_once']} at once; "
        f"{tokens:,} tokens received. Over-long and malformed ones are to be refused (HTTP 400, "
        "404, 422); who disconnects or aborts is to leave nothing in the engine.",
        "",
        "| kind | requests | as expected | errors | lost | wrong | median, s | 99 %, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, verdicts in sorted(results.kinds().items()):
        counts = [verdicts.total(), *(verdicts[v] for v in (EXPECTED, ERROR, LOST, WRONG))]
        times = [f"{results.latency(kind, quantile):.2f}" for quantile in (0.5, 0.99)]
        lines.append(f"| {kind} | {' | '.join([*(f'{c:,}' for c in counts), *times])} |")
    return [*lines, ""]


def _rest(results: Results) -> list[str]:
    grown, kill = growth(results.samples), results.kill
    sizes = [sample.bytes / MEGABYTE for sample in results.samples]
    under_way = len(kill.outcomes)
    answered = sum(o.verdict == EXPECTED for o in kill.outcomes)
    errors = sum(o.verdict == ERROR for o in kill.outcomes)
    ended = "went on" if kill.ended_seconds is None else f"ended after {kill.ended_seconds:.1f} s"
    left = ", ".join(f"{name} {value:g}" for name, value in results.left.items()) or "nothing"
    before = results.answers.get("before", [])
    same = [
        f"{sum(a == b for a, b in zip(before, answers, strict=True))} of {len(before)} {name}"
        for name, answers in results.answers.items()
        if name != "before"
    ]
    return [
        "## Memory, answers, a killed engine",
        "",
        f"* Memory of the server and its processes (resident, summed): {sizes[0]:,.0f} MB at the "
        f"start, {max(sizes):,.0f} MB at most, {sizes[-1]:,.0f} MB in the end; "
        + ("too few samples" if grown is None else f"{grown / MEGABYTE:+.1f} MB")
        + f" after the warm-up (the first {WARM_UP:.0%} of the time), medians of the first and the "
        f"last fifth of the rest; at most {results.memory_bound / MEGABYTE:g} MB are accepted.",
        f"* Left in the engine after the load (requests, cache blocks): {left}.",
        f"* Greedy answers of the idle server, equal to those before the load: {', '.join(same)}.",
        f"* `kill -9` of {kill.engine} with {under_way} requests under way: {answered} had their "
        f"answer, {errors} an error, {under_way - answered - errors} neither; the server {ended}, "
        f"another one was ready after {kill.ready_seconds:.1f} s.",
        "",
    ]


def _verdict(results: Results) -> list[str]:
    failures = results.failures()
    if not failures:
        return ["No failure."]
    return ["## Failures", "", *(f"* {failure}" for failure in failures)]
