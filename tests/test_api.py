"""`mettle.fit`, `adopt` and `open_run`: networks, data and losses of one's own become runs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners as pml_miners
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mettle
from mettle.data import BatchTransform
from mettle.errors import DataError, InputError, MettleError, RunError
from mettle.losses import ArcFace, CrossBatchMemory, SupCon, WeightedSum
from mettle.model import OnnxEmbedder, Preprocess

PEOPLE, SHOTS, SIDE = 16, 6, 8
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class Photos(Dataset):
    """Color images of a few identities, as uint8 tensors."""

    def __init__(self, people=range(PEOPLE)):
        rng = np.random.default_rng(0)
        base = rng.integers(60, 200, (PEOPLE, 3, SIDE, SIDE))
        self.targets = [who for who in people for _ in range(SHOTS)]
        noise = rng.normal(0, 20, (len(self.targets), 3, SIDE, SIDE))
        noise[:, :, SIDE // 4 :] *= 20  # the upper rows say who it is, the others nothing
        self.images = torch.from_numpy(np.clip(base[self.targets] + noise, 0, 255).astype(np.uint8))

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return self.images[i], self.targets[i]


class Normalized(Photos):
    """The same as a pipeline of torchvision would yield them."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
        return (x / 255 - mean) / std, y


class Net(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 24), nn.ReLU(), nn.Linear(24, dim))

    def forward(self, x):
        return self.layers(x)


def seeded(make=Net, *args):
    torch.manual_seed(3)
    return make(*args)


def fit(folder, model=None, data=None, loss=None, **options):
    options = {"steps": 6, "batch": (4, 4), "quiet": True, "device": "cpu"} | options
    return mettle.fit(model or seeded(), data or Photos(), loss or SupCon(0.2), folder=folder, **options)


@pytest.fixture
def no_graph(monkeypatch):
    """For tests of something else: tracing a graph takes longer than training such a network."""

    def refuse(*args, **options):
        raise InputError("no graphs in this test")

    monkeypatch.setattr("mettle.train.run_folder.encode_onnx", refuse)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "mine"
    loss = pml_losses.MultiSimilarityLoss(), pml_miners.MultiSimilarityMiner()
    return fit(folder, loss=loss, steps=60, lr=0.01)


def test_a_run_evaluates_reports_and_embeds_itself(run):
    found = run.evaluate()
    assert found.metrics["data"]["protocol"].startswith("open set")
    trained = found.metrics["scenarios"]["all"]["verification"]["eer"]["value"]
    assert trained < found.metrics["baselines"]["untrained network"]["all"]["eer"]
    assert run.report(evaluation=found).is_file()
    assert run.contract()["thresholds"]
    images = [image.permute(1, 2, 0).numpy() for image in Photos().images[:3]]
    z = run.embed(images)
    assert z.shape == (3, 6)
    np.testing.assert_allclose(run.embed(images[0]), z[:1], rtol=1e-5, atol=1e-6)
    batch = Photos().images[:3] / 255
    np.testing.assert_allclose(run.embed(batch), z, rtol=1e-5, atol=1e-6)
    assert "MultiSimilarityLoss" in repr(run) and "divided by identity" in " ".join(run.notes)


def test_a_run_opens_without_its_code_and_with_it(run):
    images = list(Photos().images[:4].permute(0, 2, 3, 1).numpy())
    graph, module = mettle.open_run(run.folder), mettle.open_run(run.folder, model=Net())
    assert isinstance(graph.model(), OnnxEmbedder)
    np.testing.assert_allclose(graph.embed(images), run.embed(images), atol=1e-5)
    np.testing.assert_array_equal(module.embed(images), run.embed(images))
    with pytest.raises(RunError, match="does not hold the weights"):
        mettle.open_run(run.folder, model=Net(dim=7))
    with pytest.raises(DataError, match="given in Python"):
        graph.evaluate()
    again = graph.evaluate(Photos()).metrics["scenarios"]["all"]["verification"]["eer"]["value"]
    assert 0 <= again <= 1


def test_a_gallery_takes_a_run_and_opens_alone(run, tmp_path):
    faces = Photos().images.permute(0, 2, 3, 1).numpy()
    with mettle.Gallery.open(tmp_path / "people.mettle", model=run) as gallery:
        for who in range(4):
            gallery.enrol(f"person {who}", list(faces[who * SHOTS : who * SHOTS + 3]))
    Image.fromarray(faces[2 * SHOTS + 4]).save(tmp_path / "probe.png")
    with mettle.Gallery.open(tmp_path / "people.mettle") as alone:
        assert alone.identify(tmp_path / "probe.png", threshold=0.5).candidates[0].identity == "person 2"
    assert (tmp_path / "people.mettle" / "model" / "graph.onnx").is_file()


def test_a_changed_graph_is_refused(run, tmp_path):
    import shutil

    folder = shutil.copytree(run.folder, tmp_path / "copy")
    content = bytearray((folder / "graph.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "graph.onnx").write_bytes(content)
    with pytest.raises(RunError, match="does not match its hash"):
        mettle.open_run(folder).embed(torch.rand(1, 3, SIDE, SIDE))


def test_a_network_without_a_graph_says_so_and_opens_with_its_code(tmp_path, no_graph):
    run = fit(tmp_path / "a")
    assert "can only be opened together with its network" in run.notes[-1]
    with pytest.raises(RunError, match=r"no graphs in this test.*model=\.\.\."):
        mettle.open_run(tmp_path / "a").model()
    batch = torch.rand(2, 3, SIDE, SIDE)
    np.testing.assert_array_equal(mettle.open_run(tmp_path / "a", model=Net()).embed(batch), run.embed(batch))


def test_any_object_that_embeds_serves_a_gallery(tmp_path):
    class Theirs:
        contract = {"dim": 2, "weights": "theirs-1", "metric": "cosine", "input": {"kind": "image"}}  # noqa: RUF012

        def embed(self, images):
            several = images if isinstance(images, list) else [images]
            return np.stack([[np.asarray(x, float).mean(), 100.0] for x in several])

    dark, light = np.full((4, 4, 3), 5, np.uint8), np.full((4, 4, 3), 250, np.uint8)
    with mettle.Gallery.open(tmp_path / "g.mettle", model=Theirs()) as gallery:
        gallery.enrol("dark", [dark])
        gallery.enrol("light", [light])
        assert gallery.identify(light, threshold=0.9).candidates[0].identity == "light"


def test_normalized_tensors_with_their_preprocessing_leave_a_run_that_takes_images(tmp_path):
    way = Preprocess(SIDE, mean=MEAN, std=STD)
    run = fit(tmp_path / "a", data=Normalized(), preprocess=way)
    assert run.contract()["input"]["kind"] == "image"
    wanted = run.model().module(torch.stack([Normalized()[i][0] for i in range(3)])).detach().numpy()
    found = mettle.open_run(tmp_path / "a").embed(list(Photos().images[:3].permute(0, 2, 3, 1).numpy()))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    tensors = fit(tmp_path / "b", data=Normalized())
    assert tensors.contract()["input"]["kind"] == "tensor" and "embeds tensors only" in tensors.notes[-1]
    with pytest.raises(InputError, match="preprocess="):
        tensors.embed("photo.jpg")


def test_splits_may_be_given_apart(tmp_path, no_graph):
    run = fit(tmp_path / "a", data=Photos(range(8)), val=Photos(range(8, 11)), test=Photos(range(11, 16)))
    facts = run.evaluate().metrics["data"]
    assert facts["test_identities"] == 5 and facts["training_identities"] == 8 and facts["shared_identities"] == 0


def test_columns_by_name_are_read_from_splits_given_apart_too(tmp_path, no_graph):
    class Shots(Photos):
        def __getitem__(self, i):
            return {"image": self.images[i], "who": self.targets[i], "camera": "ab"[i % 2]}

    parts = {"val": Shots(range(8, 11)), "test": Shots(range(11, 16))}
    run = fit(tmp_path / "a", data=Shots(range(8)), labels="who", domains="camera", **parts)
    evaluation = run.evaluate()
    assert list(evaluation.metrics["scenarios"])[-1] == "cross-domain"
    assert evaluation.verification is evaluation.results.verifications["cross-domain"]


def test_a_share_of_the_training_identities_is_kept_apart_where_splits_are_given(tmp_path, no_graph):
    run = fit(tmp_path / "a", data=Photos(range(12)), test=Photos(range(12, 16)), select="recall@1", val=0.25)
    assert sorted(np.unique(run.samples.part(name).labels).size for name in ("train", "val", "test")) == [3, 4, 9]
    assert not set(run.samples.part("train").labels) & set(run.samples.part("val").labels)
    with pytest.raises(DataError, match="too few to keep"):
        fit(tmp_path / "b", data=Photos(range(8)), test=Photos(range(8, 16)), select="eer")


def test_preprocessing_that_says_nothing_about_itself_is_applied_and_told(tmp_path, no_graph):
    def darken(image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 510

    run = fit(tmp_path / "a", preprocess=darken)
    assert "cannot keep it" in run.notes[0] and run.contract()["input"]["kind"] == "tensor"
    np.testing.assert_allclose(run.samples.read(np.arange(2)), Photos().images[:2].numpy() / 510, rtol=1e-6)
    with pytest.raises(InputError, match="must be a mettle.model.Preprocess"):
        fit(tmp_path / "b", preprocess=5)


def test_a_loader_of_normalized_tensors_trains_what_the_run_then_embeds(tmp_path, no_graph):
    way = Preprocess(SIDE, mean=MEAN, std=STD)
    options = {"preprocess": way, "test": Normalized(range(10, 16)), "batch": None, "steps": 3}
    loader = DataLoader(Normalized(range(10)), batch_size=60)
    seen = []
    net = seeded()
    net.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].detach()) if module.training else None
    )
    fit(tmp_path / "a", model=net, data=loader, **options)
    wanted = torch.stack([Normalized(range(10))[i][0] for i in range(60)])
    torch.testing.assert_close(seen[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "augment",
    ["mild", lambda image: image.flip(-1), BatchTransform(lambda batch: batch + 0.01 * torch.randn_like(batch))],
    ids=["preset", "image", "batch"],
)
def test_augmentation_of_every_kind_is_a_function_of_the_seed(tmp_path, no_graph, augment):
    one, two = (fit(tmp_path / name, augment=augment) for name in "ab")
    for name, value in one.model().state_dict().items():
        assert torch.equal(value, two.model().state_dict()[name])
    plain = fit(tmp_path / "c").model().state_dict()
    assert any(not torch.equal(value, plain[name]) for name, value in one.model().state_dict().items())


def test_class_vectors_are_counted_for_the_training_split(tmp_path, no_graph):
    run = fit(tmp_path / "a", loss={"kind": "ArcFace", "margin": 0.2})
    assert "ArcFace" in run.run_folder.recipe.title()
    both = WeightedSum({"pairs": SupCon(0.2), "classes": ArcFace(PEOPLE, 6)}, {"pairs": 1.0, "classes": 0.5})
    fit(tmp_path / "b", loss=both, steps=10)
    line = json.loads((tmp_path / "b" / "log.jsonl").read_text().splitlines()[-1])
    assert {"pairs loss", "pairs gradient", "classes loss", "classes gradient"} <= set(line)
    with pytest.raises(InputError, match="vectors for 3 classes"):
        fit(tmp_path / "c", loss=ArcFace(3, 6))


def test_a_batch_is_compared_with_a_queue_where_the_loss_can(tmp_path, no_graph):
    queue = {"classes": 4, "samples": 4, "queue": 40, "queue_encoder": "momentum", "queue_momentum": 0.9}
    with_queue, plain = fit(tmp_path / "a", batch=queue, steps=10), fit(tmp_path / "b", steps=10)
    line = json.loads((tmp_path / "a" / "log.jsonl").read_text().splitlines()[-1])
    assert line["queue_fill"] == 1.0 and line["queue_used"] == 1.0
    assert with_queue.contract()["weights"] != plain.contract()["weights"]
    memory = CrossBatchMemory(SupCon(0.2), 40, 6)
    fit(tmp_path / "c", loss=memory)
    assert len(memory.queue) == 40


def test_a_data_loader_keeps_its_order_and_says_so(tmp_path, no_graph):
    loader = DataLoader(Photos(range(10)), batch_size=30, shuffle=True)
    run = fit(tmp_path / "a", data=loader, test=Photos(range(10, 16)), epochs=2, steps=None, batch=None)
    assert run.run_folder.recipe.train.steps == 4
    assert "not be bit-identical" in " ".join(run.notes)
    assert run.evaluate().metrics["data"]["test_identities"] == 6


def test_published_training_can_be_written_down(tmp_path, no_graph):
    schedule = {"kind": "StepLR", "step_size": 2, "gamma": 0.5}
    run = fit(
        tmp_path / "a", optimizer={"kind": "sgd", "momentum": 0.9}, lr=0.1, schedule=schedule, epochs=3, steps=None
    )
    lines = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "loss" in line][-1] == 2
    assert run.run_folder.recipe.train.optimizer == {"kind": "SGD", "momentum": 0.9}


WRONG = {
    "a feature map": ({"model": nn.Conv2d(3, 4, 3)}, "flatten or pool the feature map"),
    "no module": ({"model": 3}, "must be an nn.Module"),
    "a module that fails": ({"model": nn.Linear(5, 2)}, "the module fails on"),
    "no labels": ({"data": [torch.zeros(3, 8, 8)] * 8}, "no labels"),
    "an unknown optimizer": ({"optimizer": "adamx"}, "torch.optim has no 'adamx'"),
    "an unknown schedule": ({"schedule": "cosin"}, "did you mean 'cosine'"),
    "an unknown metric": ({"select": "eerr"}, "eer"),
    "a metric that cannot be measured": ({"select": "tar@1e-9"}, "cannot be measured"),
    "a class as loss": ({"loss": SupCon}, "call it"),
    "no loss": ({"loss": 3}, "callable on"),
    "a loss of several numbers": ({"loss": lambda z, y: z.mean(1)}, r"one number as a tensor, got shape \(16,\)"),
    "a loss that is no tensor": ({"loss": lambda z, y: 0.5}, "got float"),
    "a loss without gradient": ({"loss": lambda z, y: z.detach().mean()}, "no gradient"),
    "a loss of another dimension": ({"loss": pml_losses.ArcFaceLoss(16, 5)}, r"the loss fails on .* \(16, 6\)"),
    "nothing to train": ({"model": nn.Flatten()}, "mettle.adopt"),
    "epochs and steps": ({"epochs": 2, "steps": 3}, "not both"),
    "patience alone": ({"patience": 3}, "select"),
    "too few people": ({"data": Photos(range(2))}, "too few"),
    "a wrong batch": ({"batch": 3}, "batch must be"),
    "a queue for a loss of another library": (
        {"loss": pml_losses.SupConLoss(), "batch": {"classes": 4, "samples": 4, "queue": 40}},
        "SupConLoss cannot compare a batch with a queue",
    ),
    "no augmentation": ({"augment": 5}, "augment must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_before_training_begins(tmp_path, case):
    options, said = WRONG[case]
    with pytest.raises(MettleError, match=said) as caught:
        fit(tmp_path / "a", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_a_run_is_not_resumed_with_another_network(tmp_path, no_graph):
    fit(tmp_path / "a")
    with pytest.raises(RunError, match="are of another network or loss: .*size mismatch") as caught:
        fit(tmp_path / "a", model=seeded(Net, 7), resume=True)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_tried_stays_as_it_was(tmp_path, no_graph):
    calls = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, z, y):
            self.seen += 1
            calls.append(float(self.seen))
            return z.square().mean() + torch.rand(())

    fit(tmp_path / "a", loss=Counting(), steps=3)
    assert calls[:4] == [1.0, 1.0, 2.0, 3.0], "once on a copy, then in training"


def test_an_adopted_model_is_measured_and_gets_thresholds(tmp_path):
    theirs = seeded()
    run = mettle.adopt(theirs, tmp_path / "theirs", preprocess={"size": SIDE, "mean": list(MEAN), "std": list(STD)})
    found = run.evaluate(Photos())
    assert run.contract()["thresholds"] and "unknown" in found.metrics["data"]["protocol"]
    again = mettle.open_run(tmp_path / "theirs")
    assert "Net, trained elsewhere" in repr(again)
    images = list(Photos().images[:2].permute(0, 2, 3, 1).numpy())
    wanted = theirs.eval()(torch.stack([Normalized()[i][0] for i in range(2)])).detach().numpy()
    np.testing.assert_allclose(again.embed(images), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="example="):
        mettle.adopt(theirs, tmp_path / "other")
    with pytest.raises(RunError, match="there already"):
        mettle.adopt(theirs, tmp_path / "theirs", example=torch.rand(2, 3, SIDE, SIDE))


def test_token_ids_train_and_embed(tmp_path):
    tokens = torch.randint(1, 20, (PEOPLE, 5), generator=torch.Generator().manual_seed(0))
    data = [(tokens[who].roll(k % 2), who) for who in range(PEOPLE) for k in range(4)]
    net = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, 4))
    run = fit(tmp_path / "a", model=net, data=data)
    assert run.contract()["input"]["dtype"] == "int64"
    np.testing.assert_allclose(mettle.open_run(run.folder).embed(tokens), run.embed(tokens), atol=1e-5)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import mettle.train.run_folder
from test_api import InputError, Net, Photos, SupCon, fit, seeded
from mettle.train import Callback

def refuse(*args, **options):
    raise InputError("no graphs in this test")

mettle.train.run_folder.encode_onnx = refuse

class Kill(Callback):
    def on_step(self, state):
        if state.step == {step} and not {resume}:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)

fit({folder!r}, steps=12, select="eer", patience=50, val=0.25, ema=0.5, callbacks=[Kill()], resume={resume},
    batch={{"classes": 3, "samples": 4}})
"""


def test_a_killed_fit_resumes_bit_for_bit(tmp_path):
    """Validation, best checkpoint, early stopping and a moving average included."""

    def start(folder: Path, step: int, resume: bool) -> int:
        words = {"tests": str(Path(__file__).parent), "folder": str(folder), "step": step, "resume": resume}
        return subprocess.run([sys.executable, "-c", SCRIPT.format(**words)], check=False).returncode

    assert start(tmp_path / "whole", 0, True) == 0
    assert start(tmp_path / "cut", 8, False) == -signal.SIGKILL
    assert start(tmp_path / "cut", 0, True) == 0
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    read = [json.loads((tmp_path / name / "contract.json").read_text()) for name in ("cut", "whole")]
    assert read[0]["selection"] == read[1]["selection"]
