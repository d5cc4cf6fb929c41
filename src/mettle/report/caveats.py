"""What a reader should know before trusting the numbers of a run, most serious first."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.bootstrap import LEAST
from mettle.evaluate.run.scenarios import PRETRAINED, RAW, UNTRAINED
from mettle.report.format import format_percent, format_rate, scenario_title
from mettle.train.run_folder import RunFolder

FEW_IDENTITIES = 30  # below, a bootstrap over identities is too coarse for its nominal level
COARSE_EER = 0.005  # half the gap between the operating points around the EER; above, a warning


def list_caveats(metrics: Mapping[str, Any]) -> list[str]:
    """What a reader should know before trusting the numbers, most serious first: that training has not helped leads."""
    data, verdict = metrics["data"], training_verdict(metrics)
    raw = _compare_baseline(metrics, RAW, "Raw inputs do as well")
    found = [text for text in (verdict, raw) if text]
    if data["shared_identities"] is None:
        found.append(
            "Open or closed set unknown: the run does not say who it was trained on. Where test identities were among "
            "them, the numbers say nothing about new ones."
        )
    elif data["shared_identities"]:
        kind, told = "Mixed", "mix known and new"
        if data["shared_identities"] == data["test_identities"]:
            kind, told = "Closed", "say nothing about new"
        chance = " Equal names may be chance." if names_only_note(data) else ""
        found.append(
            f"{kind} set: {data['shared_identities']:,} of {data['test_identities']:,} test identities were "
            f"also trained on{names_only_note(data)}. The numbers {told} identities.{chance}"
        )
    copied = data.get("copied_samples") or {"count": 0}
    if copied["count"]:
        found.append(
            f"{copied['count']:,} of {copied['tested']:,} test samples are exact copies of training samples (first: "
            f"{copied['test']}, a copy of {copied['train']}): what is measured on them flatters the model."
        )
    if data["test_identities"] < LEAST:
        found.append(
            f"Only {data['test_identities']} test identities: too few for any interval, which needs {LEAST}; the "
            "numbers may be far from those of other people or things."
        )
    elif data["test_identities"] < FEW_IDENTITIES:
        found.append(
            f"Only {data['test_identities']} test identities: intervals over identities are rough, and "
            "probably too short."
        )
    entries = metrics.get("thresholds", {}).get("set", {}).values()
    if any("optimistic" in entry.get("measured_on", "") for entry in entries):
        found.append("Thresholds were set on the test identities themselves, so what they do on test is optimistic.")
    found += describe_selection(metrics)
    for key, scenario in metrics["scenarios"].items():
        name, v = scenario_title(key), scenario["verification"]
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
        found += [f"{name}: {text}." for text in dict.fromkeys(v["warnings"] + scenario["retrieval"]["warnings"])]
    if len(metrics["scenarios"]) == 1:
        found.append("The data name no domains, so nothing here says how the model does across devices or sessions.")
    return found


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
    """That the network, or its pretrained backbone, was as good before training; empty where training has helped."""
    texts = [_compare_baseline(metrics, name, "Training has not helped") for name in (UNTRAINED, PRETRAINED)]
    return " ".join(text for text in texts if text)


def _compare_baseline(metrics: Mapping[str, Any], baseline: str, said: str) -> str:
    """That a baseline does at least as well as the model, and where; empty where it does not, or no error is left."""
    found = []
    for name, scenario in metrics["scenarios"].items():
        own = scenario["verification"]["eer"]["value"]
        other = metrics.get("baselines", {}).get(baseline, {}).get(name, {}).get("eer")
        if own and _is_beaten(own, other):
            text = f"EER {format_percent(own)} of this model against {format_percent(other)} of the {baseline}"
            found.append(f"{scenario_title(name)}, {text}")
    return f"{said}: {'; '.join(found)}." if found else ""


def _is_beaten(own: float | None, other: float | None) -> bool:
    return own is not None and other is not None and other <= own


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
