"""What a reader should know before trusting the numbers of a page: what decides about them first, the rest after it.

Every sentence that warns the reader of a run, a comparison or an audit is made here, or ranked here where
:mod:`mettle.evaluate` found it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mettle.evaluate.bootstrap import LEAST
from mettle.evaluate.run.scenarios import PRETRAINED, RAW, UNTRAINED
from mettle.report.format import format_percent, format_rate, scenario_title
from mettle.report.headline import format_points, format_points_interval, question_name
from mettle.train.run_folder import RunFolder

FEW_IDENTITIES = 30  # below, a bootstrap over identities is too coarse for its nominal level
COARSE_EER = 0.005  # half the gap between the operating points around the EER; above, a warning
AUDIT_DECISIVE = ("collapse", "below 0.5", "exact copies", "training split", "too few for any interval")


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
    if data["test_identities"] < LEAST and question != "closed-set":
        decisive.append(
            f"Only {data['test_identities']} test identities: too few for any interval, which needs {LEAST}; the "
            "numbers may be far from those of other people or things."
        )
    elif data["test_identities"] < FEW_IDENTITIES and question != "closed-set":
        others.append(
            f"Only {data['test_identities']} test identities: intervals over identities are rough, and "
            "probably too short."
        )
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
        others.append("The data name no domains, so nothing here says how the model does across devices or sessions.")
    return Caveats(tuple(decisive), tuple(others))


def list_caveats(metrics: Mapping[str, Any]) -> list[str]:
    """The same in one list, what decides first."""
    return list(rank_caveats(metrics))


def rank_audit_caveats(warnings: Sequence[str]) -> Caveats:
    """The warnings of an audit: collapse, labels that do not fit, copies and people that were trained on come first."""
    decisive = tuple(text for text in warnings if any(words in text for words in AUDIT_DECISIVE))
    return Caveats(decisive, tuple(text for text in warnings if text not in decisive))


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
    for point in v["tar"]:
        if point["status"] != "ok":
            allowed = point["far"] * point["impostors"]
            found.append(
                f"{name}: TAR at FAR {format_rate(point['far'])} is {point['status']}: {point['impostors']:,} "
                f"impostor pairs allow {allowed:.3g} false accepts, 30 are wanted."
            )
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
