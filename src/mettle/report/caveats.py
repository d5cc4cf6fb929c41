"""What a reader should know before trusting the numbers of a page: what decides about them first, the rest after it.

Every sentence that warns the reader of a run, a comparison or an audit is made here. What a single result of
:mod:`mettle.evaluate` says of itself is ranked here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mettle.evaluate.audit import Audit
from mettle.evaluate.bootstrap import LEAST
from mettle.evaluate.groups import count_paired_subjects
from mettle.evaluate.run.scenarios import PRETRAINED, RAW, UNTRAINED
from mettle.report.format import format_percent, format_rate, scenario_title
from mettle.report.headline import format_points, format_points_interval, question_name
from mettle.train.run_folder import RunFolder

FEW_IDENTITIES = 30  # below, a bootstrap over identities is too coarse for its nominal level
NO_DOMAINS = "The data name no domains, so nothing here says how the model does across devices, cameras or sessions."
COARSE_EER = 0.005  # half the gap between the operating points around the EER; above, a warning


@dataclass(frozen=True)
class Caveats:
    """What a reader should know.

    Attributes:
        decisive: what may turn a conclusion around; shown at once.
        others: what qualifies single numbers; folded on a page.
    """

    decisive: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __iter__(self):
        return iter((*self.decisive, *self.others))

    def __len__(self) -> int:
        return len(self.decisive) + len(self.others)


def rank_caveats(metrics: Mapping[str, Any]) -> Caveats:
    """What to know before trusting the numbers of a run; that training has not helped comes first."""
    data, question = metrics["data"], question_name(metrics)
    decisive, others = [], []
    verdict = training_verdict(metrics)
    raw = _compare_baselines(metrics, (RAW,), "Raw inputs do as well")
    decisive += [text for text in (verdict, raw) if text]
    (others if question == "closed-set" else decisive).extend(_describe_shared_identities(data))
    copied = data.get("copied_samples") or {"count": 0}
    if copied["count"]:
        decisive.append(
            f"{copied['count']:,} of {copied['tested']:,} test samples are exact copies of training samples (first: "
            f"{copied['test']}, a copy of {copied['train']}): what is measured on them flatters the model."
        )
    if question != "closed-set":
        tested = data["test_identities"]
        (decisive if tested < LEAST else others).extend(_describe_few_identities(tested, f"{tested} test identities"))
    if question == "closed-set":
        decisive += _describe_uncertain_gain(metrics)
    entries = metrics.get("thresholds", {}).get("set", {}).values()
    if any("optimistic" in entry.get("measured_on", "") for entry in entries):
        others.append("Thresholds were set on the test identities themselves, so what they do on test is optimistic.")
    others += describe_selection(metrics)
    if question == "retrieval" and metrics["clustering"]["status"] != "ok":
        others.append(f"NMI and F1 are {metrics['clustering']['status']}.")
    for key, scenario in metrics["scenarios"].items():
        others += _describe_scenario(scenario_title(key), scenario)
    if len(metrics["scenarios"]) == 1:
        others.append(NO_DOMAINS)
    return Caveats(tuple(decisive), tuple(others))


def list_caveats(metrics: Mapping[str, Any]) -> list[str]:
    """The same in one list, what decides first."""
    return list(rank_caveats(metrics))


def rank_audit_caveats(found: Audit) -> Caveats:
    """What to know before trusting an audit.

    A collapse, labels that do not fit, copies, people that were trained on and too few people come first.
    """
    decisive, others = [], []
    if found.geometry is not None and found.geometry.collapsed:
        decisive.append(f"{found.geometry.verdict[0].upper()}{found.geometry.verdict[1:]}.")
    v = found.ways["all"].verification
    for text in v.warnings:
        if text not in v.notes:  # copies are told below, by name
            (decisive if "below 0.5" in text else others).append(f"{text}.")
    decisive += _describe_copies(found)
    if found.table.split is not None and (found.table.split == 0).any():
        decisive.append(
            "The file holds a training split: numbers on people who were trained on flatter. Audit the others alone "
            "with --where split=test."
        )
    people, _ = count_paired_subjects(v)  # who has one sample only makes impostor pairs, and no miss
    who = f"{people} identities" + ("" if people == v.subjects else f" with two samples, of {v.subjects:,} in all")
    (decisive if people < LEAST else others).extend(_describe_few_identities(people, who))
    for name, way in found.ways.items():
        points = [vars(way.verification.operating_point(far)) for far in found.fars]
        others += _describe_rates(scenario_title(name), points)
    if found.table.domain is None:
        others.append(NO_DOMAINS)
    return Caveats(tuple(decisive), tuple(others))


def _describe_copies(found: Audit) -> list[str]:
    """That rows are copies of others, the first of them by name."""
    copies, table = found.copies, found.table
    if not copies.rows:
        return []
    two = " and ".join(table.called(at) for at in copies.examples[0][:2])
    text = (
        f"{copies.rows:,} of {len(table):,} rows are exact copies of another row ({copies.vectors:,} vectors occur "
        f"more than once, first {two}): copies find each other, so errors look rarer than they are. Leave one of each, "
        "or give copies one id."
    )
    if copies.contradictions:
        text += f" {copies.contradictions:,} of these vectors carry several labels."
    return [text]


def _describe_few_identities(count: int, who: str) -> list[str]:
    """That there are too few of them for an interval, or for a good one."""
    if count < LEAST:
        return [
            f"Only {who}: too few for any interval, which needs {LEAST}; the numbers may be far from those of other "
            "people or things."
        ]
    if count < FEW_IDENTITIES:
        return [f"Only {who}: intervals over identities are rough, and probably too short."]
    return []


def _describe_rates(name: str, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Operating points that rest on too few impostor pairs."""
    return [
        f"{name}: TAR at FAR {format_rate(point['far'])} is {point['status']}: {point['impostors']:,} impostor pairs "
        f"allow {point['far'] * point['impostors']:.3g} false accepts, 30 are wanted."
        for point in points
        if point["status"] != "ok"
    ]


def _describe_shared_identities(data: Mapping[str, Any]) -> list[str]:
    """Who of the test split was trained on, where that matters."""
    if data["shared_identities"] is None:
        return [
            "Open or closed set unknown: the run does not say who it was trained on. Where test identities were among "
            "them, the numbers say nothing about new ones."
        ]
    if not data["shared_identities"]:
        return []
    kind, told = "Mixed", "mix known and new"
    if data["shared_identities"] == data["test_identities"]:
        kind, told = "Closed", "say nothing about new"
    chance = " Equal names may be chance." if names_only_note(data) else ""
    return [
        f"{kind} set: {data['shared_identities']:,} of {data['test_identities']:,} test identities were "
        f"also trained on{names_only_note(data)}. The numbers {told} identities.{chance}"
    ]


def _describe_scenario(name: str, scenario: Mapping[str, Any]) -> list[str]:
    """What limits single numbers of one scenario."""
    v, found = scenario["verification"], []
    if v["eer"]["value"] is None:
        found.append(f"{name}: EER is not measurable.")
    elif v["eer"]["half_gap"] > COARSE_EER:
        found.append(f"{name}: EER is known to ±{format_percent(v['eer']['half_gap'])} only: few distinct scores.")
    found += _describe_rates(name, v["tar"])
    return found + [f"{name}: {text}." for text in dict.fromkeys(v["warnings"] + scenario["retrieval"]["warnings"])]


def describe_selection(metrics: Mapping[str, Any]) -> list[str]:
    """What selection on the validation identities means for the numbers; nothing where nothing was selected."""
    chosen = metrics.get("selection")
    if not chosen:
        return []
    best = "lowest" if chosen["direction"] == "min" else "highest"
    return [
        f"The weights are those of step {chosen['step']:,}, with the {best} {chosen['metric']} of "
        f"{chosen['validations']:,} validations. The validation identities chose them and thresholds were set on the "
        "same identities, so the TAR measured there is optimistic; test identities took no part."
    ]


def training_verdict(metrics: Mapping[str, Any]) -> str:
    """That the network, or its pretrained backbone, was as good before training; empty where training has helped.

    It is judged by the first number of the question: EER, Recall@1, or top-1 of the linear probe.
    """
    return _compare_baselines(metrics, (UNTRAINED, PRETRAINED), "Training has not helped")


def _compare_baselines(metrics: Mapping[str, Any], names: Sequence[str], said: str) -> str:
    """That a baseline does at least as well as the model, and where; empty where it does not, or no error is left."""
    found = []
    for baseline in names:
        beaten = "; ".join(_beaten_by(metrics, baseline))
        if beaten:
            found.append(f"{said}: {beaten}.")
    return " ".join(found)


def _beaten_by(metrics: Mapping[str, Any], baseline: str) -> list[str]:
    """Where a baseline does at least as well as the model, in words."""
    question = question_name(metrics)
    if question == "closed-set":
        before = metrics["probe"]["labels"].get("baselines", {}).get(baseline)
        gain = None if before is None else before["gain"]["top_1"]
        if gain is None or gain["difference"] > 0 or gain["first"] == 1:
            return []
        return [
            f"top-1 {format_percent(gain['first'], 1)} of this model against {format_percent(gain['second'], 1)} of "
            f"the {baseline}"
        ]
    found = []
    for name, scenario in metrics["scenarios"].items():
        before = metrics.get("baselines", {}).get(baseline, {}).get(name, {})
        if question == "retrieval":
            own, other = scenario["retrieval"]["metrics"].get("recall@1", {}).get("value"), before.get("recall@1")
            if own is not None and other is not None and other >= own and own < 1:
                text = f"Recall@1 {format_percent(own, 1)} of this model against {format_percent(other, 1)}"
                found.append(f"{scenario_title(name)}, {text} of the {baseline}")
            continue
        own, other = scenario["verification"]["eer"]["value"], before.get("eer")
        if own and other is not None and other <= own:
            text = f"EER {format_percent(own)} of this model against {format_percent(other)} of the {baseline}"
            found.append(f"{scenario_title(name)}, {text}")
    return found


def _describe_uncertain_gain(metrics: Mapping[str, Any]) -> list[str]:
    """That a gain of a closed set may be chance, or that the worst group has none."""
    found = []
    for other, before in metrics["probe"]["labels"].get("baselines", {}).items():
        gain = before["gain"]["top_1"]
        if gain["difference"] > 0 and gain["interval"] is not None and gain["interval"]["low"] <= 0:
            found.append(
                f"The gain over the {other} may be chance: top-1 {format_points(gain['difference'])}, 95 % interval "
                f"{format_points_interval(gain['interval'])}."
            )
        worst = before["gain"].get("worst_group")
        if worst is not None and worst["difference"] <= 0 < gain["difference"]:
            found.append(
                f"Training has helped on average and not the worst group: {format_percent(worst['first'], 1)} of it "
                f"against {format_percent(worst['second'], 1)} of the {other}."
            )
    return found


def names_only_note(data: Mapping[str, Any]) -> str:
    """What to add to "trained on" where only names tell it: of data that the run was not trained on."""
    return ", going by names" if data.get("by_names") else ""


def describe_changed_data(run: RunFolder, metrics: Mapping[str, Any]) -> list[str]:
    """A warning where the model was tested on other data than it was trained for."""
    if run.state.get("data") is None or run.matches_data(metrics["data"]["fingerprint"]):
        return []
    return [
        f"These are not the data as they were in training (fingerprint {metrics['data']['fingerprint']} now, "
        f"{run.state['data']} then): other data, or the same ones changed."
    ]
