"""What a comparison found, in sentences computed from it."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.statistics import Interval
from experiments.summary import CONDITIONS, LEAST_OF_LOSS, Comparison, Group, Row
from experiments.table import Scale


def headline(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    row, scale = _of_pulse(comparison), Scale.of(comparison)
    if row is None:
        best = max(comparison.rows, key=lambda row: row.gain.mean)
        score = scale.score(Interval(best.final.mean))
        return f"{best.label} ends at {comparison.one.metric} {score}, {_moved(best, scale)}"
    share, sends = share_of(row), _fewer_bytes(row)
    if row.reference in _unmoved(comparison):
        return (
            f"{row.reference} gained nothing that can be told from noise, so what {row.label} keeps of it "
            "can't be said" + (f"; {row.label} sends {sends}" if sends else "")
        )
    gained = f"{row.label} ends {_moved(row, scale)}"
    if share is not None:
        gained = f"{row.label} keeps {_share(share)} of {row.reference}'s gain"
        if share is row.share_second and row.share is not None:
            gained += f" ({_share(row.share)} by greedy {comparison.one.metric})"
    return f"{gained}, sending {sends}" if sends else gained


def gap(comparison: Comparison) -> str:
    """Where PULSELoCo ends beside its reference."""
    row, scale = _of_pulse(comparison), Scale.of(comparison)
    if row is None:
        return headline(comparison)
    if row.minus is None:
        return f"{row.label} ends {_moved(row, scale)}"
    amount, half = scale.amount(row.minus.mean), row.minus.half
    said = f"{row.label} ends {amount} {'above' if row.minus.mean >= 0 else 'below'} {row.reference}"
    if half is None:
        return said
    within = "within" if abs(row.minus.mean) <= half else "beyond"
    return f"{said}, {within} the seeds' ± {scale.amount(half)}"


def savings(comparison: Comparison) -> str:
    """How much less PULSELoCo sends."""
    row = _of_pulse(comparison)
    fewer = _fewer_bytes(row) if row is not None else ""
    if row is not None and fewer:
        return f"{row.label} sends {fewer}"
    least = min((r for r in comparison.rows if r.sent_bytes > 0), key=lambda r: r.sent_bytes, default=None)
    return f"{least.label} sends {least.sent_bytes / 1e6:,.3g} MB per rank" if least else "Nothing is sent"


def notes(comparison: Comparison) -> list[str]:
    """What a reader needs in order to read the table right."""
    said = [_of_intervals(comparison), *_of_references(comparison)]
    said += [*_of_noise(comparison), *_of_reach(comparison)]
    starts = {round(result.first, 9) for result in comparison.results}
    if len(starts) > 1:
        said.append(
            f"The runs do not share one warm start: they begin at {min(starts):.4f} to {max(starts):.4f}."
        )
    if any(row.density is not None for row in comparison.rows):
        said.append(
            "Density and the other figures of a round are means over the second half of the rounds: the "
            "first ones are sparser, because the warm start's weights are BF16 values."
        )
    return [*said, of_bytes(comparison)]


def of_bytes(comparison: Comparison) -> str:
    """Where DDP's bytes come from, and how far the accounts are from the kernel's own count."""
    apart: dict[bool, list[float]] = {True: [], False: []}
    for result in comparison.results:
        # With several ranks per site the kernel sees the site's inner traffic too.
        if result.kernel_sent_bytes and result.accounted_bytes and result.sites == result.ranks:
            beyond = result.kernel_sent_bytes / result.accounted_bytes - 1
            apart[result.method == "ddp"].append(beyond)
    sources = {result.bytes_source for result in comparison.results if result.method == "ddp"}
    ddp = {
        "kernel": "DDP's bytes are the kernel's TCP count. ",
        "computed": "DDP's bytes are computed (ring all-reduce): TCP counters cannot tell them here. ",
    }
    said = "".join(ddp.get(source, "") for source in sorted(sources))
    beside = {True: "the ring formula (DDP)", False: "what loco counted"}
    checks = [f"{beside[ddp]} by {_spread(found)}" for ddp, found in apart.items() if found]
    if checks:
        return (
            f"{said}The kernel's TCP counters exceed {' and '.join(checks)}: gloo's framing, which weighs "
            "most in small rounds."
        )
    if any(result.bytes_source == "counted" and result.sent_bytes for result in comparison.results):
        return f"{said}Bytes are loco's own count: TCP counters cannot check them here."
    return said.strip() or "Nothing was sent."


def share_of(row: Row) -> Interval | None:
    """Of the reference's gain, by the score that has less noise."""
    return row.share_second or row.share


def times(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x"


def _of_intervals(comparison: Comparison) -> str:
    """What ± means in which rows."""
    single = [row for row in comparison.rows if len(row.seeds) == 1]
    said = []
    if len(single) < len(comparison.rows):
        most = max(len(row.seeds) for row in comparison.rows)
        said.append(
            f"± is a 95% t-interval over seeds (up to {most}); differences and shares are paired by seed."
        )
    if single:
        whose = "There is one seed" if not said else f"{', '.join(row.label for row in single)}: one seed"
        if single[0].interval_of == "held-out":
            size = comparison.one.config["arithmetic"]["held_out"]
            said.append(
                f"{whose}, and ± is the 95% interval that the size of the held-out set leaves (Wilson's, of "
                f"{size:,} problems): nothing here says how far another seed would end up."
            )
        else:
            said.append(f"{whose}: nothing here says how far another would end up.")
    return " ".join(said)


def _of_references(comparison: Comparison) -> list[str]:
    if comparison.reference is None:
        return []
    by_reference: dict[str, list[Group]] = {}
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        if row.reference is not None:
            by_reference.setdefault(row.reference, []).append(group)
    config = comparison.reference.config
    said = [
        f"The reference is {comparison.reference.label} (α {config['outer_lr']:g}, "
        f"μ {config['outer_momentum']:g}, {'FP32' if comparison.reference.is_dense else config['wire']})"
        + f"{_others(comparison, by_reference)}."
    ]
    named = {group.label: group for group in comparison.groups}
    for label, groups in by_reference.items():
        for group in groups:
            keys = [k for k in CONDITIONS if group.config.get(k) != named[label].config.get(k)]
            if keys and group.method not in ("single", "ddp"):
                said.append(
                    f"{group.label} was trained under conditions of its own ({', '.join(keys)}): compare "
                    "with care."
                )
    return said


def _unmoved(comparison: Comparison) -> set[str]:
    """The references that gained nothing to speak of by any score."""
    by_score = [{group.label for group in comparison.unmoved(score)} for score in comparison.scores]
    return set.intersection(*by_score)


def _of_noise(comparison: Comparison) -> list[str]:
    """Why there is no share of some reference's gain."""
    by_score = {score: comparison.unmoved(score) for score in comparison.scores}
    said = [
        f"By {score} the gain of {', '.join(group.label for group in groups)} can't be told from noise, and "
        "no share of it is shown."
        for score, groups in by_score.items()
        if groups
    ]
    if said:
        least = (
            f"than {LEAST_OF_LOSS:.1%} of the loss"
            if comparison.one.metric == "loss"
            else "than the one that the size of the held-out set leaves"
        )
        said[-1] += f" (A gain counts if it is more than the 95% interval over the seeds, or {least}.)"
    return said


def _others(comparison: Comparison, by_reference: dict[str, list[Group]]) -> str:
    """Whose reference is another one."""
    assert comparison.reference is not None
    said = ""
    for label, groups in by_reference.items():
        others = [group.label for group in groups if group.label != label]
        if label != comparison.reference.label and others:
            said += f"; for {' and '.join(others)} it is {label}, trained under the same conditions"
    return said


def _of_reach(comparison: Comparison) -> list[str]:
    reference = comparison.reference
    if reference is None or not any(g.method == "ddp" for g in comparison.groups):
        return []
    alpha, mu = reference.config["outer_lr"], reference.config["outer_momentum"]
    reach = alpha / (1 - mu)
    if reach <= 1:
        return []
    return [
        f"{reference.label} moves the weights up to α/(1−μ) = {reach:.3g} times as far as its inner steps "
        "do: a lead over DDP at the same inner learning rate is that reach, not better training."
    ]


def _of_pulse(comparison: Comparison) -> Row | None:
    return comparison.row(comparison.pulse) if comparison.pulse is not None else None


def _fewer_bytes(row: Row) -> str:
    ratios = {"DDP": row.below_ddp, row.reference: row.below_diloco}
    parts = [f"{times(ratio)} fewer than {name}" for name, ratio in ratios.items() if ratio is not None]
    return " and ".join(parts).replace("fewer than", "fewer bytes than", 1)


def _moved(row: Row, scale: Scale) -> str:
    better = "better" if row.gain.mean >= 0 else "worse"
    return f"{scale.amount(row.gain.mean)} {better} than the warm start"


def _share(found: Interval) -> str:
    return f"{found.mean:.0%}" + ("" if found.half is None else f" ± {found.half:.0%}")


def _spread(values: Sequence[float]) -> str:
    return " to ".join(
        sorted({f"{min(values):.2%}", f"{max(values):.2%}"}, key=lambda text: float(text[:-1]))
    )
