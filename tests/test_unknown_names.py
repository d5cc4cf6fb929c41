"""A peer's name is answered with ours, a misspelt one with the nearest; of attributes, imports and arguments."""

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from mettle import data, evaluate, losses
from mettle.errors import InputError, MettleError, UnknownArgument
from mettle.unknown_names import PEER_ARGUMENTS, explain_arguments

X, Y = np.eye(4), [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("room", "name", "answer"),
    [
        (losses, "NTXent", "it is called InfoNCE here"),
        (losses, "NTXentLoss", "it is called InfoNCE here"),
        (losses, "NT_Xent", "it is called InfoNCE here"),
        (losses, "SupConLoss", "it is called SupCon here"),
        (losses, "TripletMarginLoss", "it is called Triplet here"),
        (losses, "ContrastiveLoss", "it is called Contrastive here"),
        (losses, "ArcFaceLoss", "it is called ArcFace here"),
        (losses, "CosFaceLoss", "it is called CosFace here"),
        (losses, "NPairsLoss", "it is called NPair here"),
        (losses, "LiftedStructureLoss", "it is called LiftedStructure here"),
        (losses, "MPerClassSampler", "it is mettle.data.PKBatchSampler here"),
        (losses, "AngularLoss", "AngularLoss is not here yet"),
        (losses, "FastAPLoss", "FastAPLoss is not here yet"),
        (losses, "CircleLoss", "it is called Circle here"),
        (losses, "SubCenterArcFaceLoss", "it is called SubCenterArcFace here"),
        (losses, "SupConn", "did you mean 'SupCon'?"),
        (evaluate, "recall_at_k", "it is retrieval(embeddings, labels).recall[k] here"),
        (evaluate, "roc_auc", "it is verification(embeddings, labels).auc here"),
        (evaluate, "equal_error_rate", "it is verification(embeddings, labels).eer here"),
        (evaluate, "AccuracyCalculator", "it is retrieval(embeddings, labels).recall[k]"),
        (evaluate, "MPerClassSampler", "it is mettle.data.PKBatchSampler here"),
        (evaluate, "verificaton", "did you mean 'verification'?"),
        (data, "MPerClassSampler", "it is called PKBatchSampler here"),
        (data, "ImageFolder", "it is read(folder) here"),
        (data, "Sampels", "did you mean 'Samples'?"),
    ],
)
def test_a_name_that_is_not_there_is_answered(room, name, answer):
    assert not hasattr(room, name)
    with pytest.raises(AttributeError) as attribute:
        getattr(room, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from {room.__name__} import {name}")
    for caught in (attribute, imported):
        assert isinstance(caught.value, MettleError)
        assert str(caught.value).startswith(f"{room.__name__} has no {name}") and answer in str(caught.value)


@pytest.mark.parametrize("room", [losses, evaluate])
def test_what_is_named_in_an_answer_is_there(room):
    peers = sys.modules[f"{room.__name__}.peer_names"]
    for theirs, ours in peers.PEERS.items():
        first = ours.partition("(")[0].partition(",")[0]
        if first.startswith("mettle."):
            module, _, attribute = first.rpartition(".")
            assert hasattr(__import__(module, fromlist=[attribute]), attribute), theirs
        else:
            assert first in room.__all__, theirs
    for name in peers.PLANNED:
        assert not hasattr(room, name) and name not in peers.PEERS


def test_modules_and_private_names_are_looked_for_as_ever():
    code = "from mettle.evaluate import run, protocol; from mettle.losses import given_pairs; print(run.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "mettle.evaluate.run\n", done.stderr
    with pytest.raises(AttributeError, match="module 'mettle.losses' has no attribute '__nothing__'"):
        losses.__nothing__  # noqa: B018


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: losses.SupCon(temprature=0.1), "SupCon has no argument 'temprature'; did you mean 'temperature'?"),
        (lambda: losses.InfoNCE(T=0.1), "InfoNCE has no argument 'T': it is called temperature here"),
        (lambda: losses.InfoNCE(tau=0.1), "InfoNCE has no argument 'tau': it is called temperature here"),
        (lambda: losses.DASupCon(tau=0.1), "DASupCon has no argument 'tau': it is called temperature here"),
        (lambda: losses.ArcFace(9, 4, s=64), "ArcFace has no argument 's': it is called scale here"),
        (lambda: losses.CosFace(9, 4, m=0.1), "CosFace has no argument 'm': it is called margin here"),
        (
            lambda: losses.SubCenterArcFace(9, 4, sub_centers=2),
            "SubCenterArcFace has no argument 'sub_centers': it is called vectors_per_class here",
        ),
        (lambda: losses.ArcFace(9, 4, sampl=0.1), "ArcFace has no argument 'sampl'; did you mean 'sample'?"),
        (
            lambda: evaluate.verification(X, Y, domain=Y),
            "verification has no argument 'domain'; did you mean",
        ),
        (lambda: evaluate.retrieval(X, Y, id=Y), "retrieval has no argument 'id'"),
        (lambda: evaluate.domain_matrix(X, Y, Y, mod="exact"), "verification has no argument 'mod'"),
    ],
)
def test_a_wrong_keyword_is_answered(call, answer):
    with pytest.raises(UnknownArgument) as caught:
        call()
    assert str(caught.value).startswith(answer)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, InputError)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


@pytest.mark.parametrize("room", [losses, evaluate])
def test_every_loss_and_metric_answers_wrong_keywords(room):
    for name in room.__all__:
        made = getattr(room, name)
        if room is evaluate and (isinstance(made, type) or name == "domain_matrix"):
            continue  # results are made by functions, and that one passes options on to verification
        with pytest.raises(UnknownArgument, match=f"{name} has no argument 'no_such'"):
            made(no_such=1)


def test_other_type_errors_stay_as_they_are():
    with pytest.raises(TypeError, match=r"ArcFace.__init__\(\) missing 1 required positional argument: 'dim'"):
        losses.ArcFace(9)

    @explain_arguments
    def broken(value, **rest):
        return value + rest["other"]

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        broken(1, other="2")
    assert not isinstance(caught.value, MettleError)


def test_signatures_classes_and_copies_stay_what_they_are():
    assert next(iter(inspect.signature(losses.SupCon).parameters)) == "temperature"
    assert list(inspect.signature(losses.ArcFace).parameters)[:4] == ["num_classes", "dim", "scale", "margin"]
    assert "domains" in inspect.signature(evaluate.verification).parameters
    for one in (evaluate.verification, losses.DASupCon, losses.SupCon):
        assert pickle.loads(pickle.dumps(one)) is one
    assert pickle.loads(pickle.dumps(losses.SupCon(0.2))).settings == losses.SupCon(0.2).settings


def test_a_module_of_ones_own_has_it_too():
    class Mine(losses.ArcFace):
        def __init__(self, *args, strength=1.0, **options):
            super().__init__(*args, **options)
            self.strength = strength

    assert isinstance(Mine(9, 4, strength=2), torch.nn.Module)
    with pytest.raises(UnknownArgument, match="Mine has no argument 'strenght'; did you mean 'strength'"):
        Mine(9, 4, strenght=2)


def test_no_name_of_a_peer_is_an_argument_it_hides():
    assert all(theirs not in ours for theirs, ours in PEER_ARGUMENTS.items())
