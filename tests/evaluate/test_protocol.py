"""Protocols as files: made, written, read, run; and the gate that leaks fail."""

import json

import numpy as np
import pytest
from PIL import Image

from mettle.errors import DataError, InputError
from mettle.evaluate import (
    NotMeasurable,
    Protocol,
    SplitSide,
    assert_no_leakage,
    file_hashes,
    find_leakage,
    identification,
    picture_looks,
    protocol,
    verification,
)


def table(seed=0, subjects=40, each=4, d=12, noise=0.7):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(subjects), each))
    x = (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(len(y), d))).astype(np.float32)
    return x, y, 10**12 + rng.permutation(len(y)), np.where(np.arange(len(y)) % 2, "left", "right")


X, Y, IDS, DOMAIN = table()


def test_class_disjoint_keeps_people_apart_and_repeats_itself():
    p = protocol.class_disjoint(IDS, Y, test=0.3, calibration=0.2, seed=1)
    who = {name: set(Y[np.isin(IDS, getattr(p, name))]) for name in ("probes", "calibration", "training")}
    assert [len(w) for w in who.values()] == [12, 8, 20]
    assert not who["probes"] & who["calibration"]
    assert not who["probes"] & who["training"]
    mix = np.random.default_rng(0).permutation(len(Y))
    again = protocol.class_disjoint(IDS[mix], Y[mix], test=0.3, calibration=0.2, seed=1)
    assert set(again.probes) == set(p.probes)
    assert protocol.class_disjoint(IDS, Y, seed=2).fingerprint != protocol.class_disjoint(IDS, Y, seed=3).fingerprint
    v = p.run(X, Y, IDS)
    at = np.isin(IDS, p.probes)
    assert v.eer == verification(X[at], Y[at]).eer
    carried = p.transfer(X, Y, IDS, 0.05)
    assert carried.impostors == v.impostor
    assert 0.2 < carried.ratio < 4


def test_files_come_back_as_they_went(tmp_path):
    made = [
        protocol.class_disjoint(IDS, Y, calibration=0.1),
        protocol.cross_domain(IDS, Y, DOMAIN, enrol="left", probe="right"),
        protocol.k_shot(IDS, Y, k=2),
        protocol.known_unknown(IDS, Y, known=0.5),
        Protocol("listed", "verification", (1, 2, 3), trials=((1, 2, 1), (1, 3, 0))),
    ]
    for p in made:
        back = Protocol.read(p.write(tmp_path / "protocol.json"))
        assert back == p
        assert back.fingerprint == p.fingerprint


def test_cross_domain_compares_the_two_domains():
    p = protocol.cross_domain(IDS, Y, DOMAIN, enrol="left", probe="right")
    a, b = DOMAIN == "right", DOMAIN == "left"
    wanted = verification(X[a], Y[a], gallery=(X[b], Y[b]))
    assert p.run(X, Y, IDS).eer == wanted.eer
    ranked = protocol.cross_domain(IDS, Y, DOMAIN, enrol="left", probe="right", kind="retrieval")
    assert 0 < ranked.run(X, Y, IDS, k=(1,)).recall[1] <= 1
    with pytest.raises(InputError, match="no domain 'lefft'; did you mean 'left'"):
        protocol.cross_domain(IDS, Y, DOMAIN, enrol="lefft", probe="right")


def test_k_shot_enrols_k_of_everybody_and_open_sets_have_strangers():
    p = protocol.k_shot(IDS, Y, k=2)
    at = np.isin(IDS, p.gallery)
    assert (np.bincount(Y[at]) == 2).all()
    i = p.run(X, Y, IDS, fusion="mean")
    rest = ~at
    assert i.rank_1 == identification((X[at], Y[at]), (X[rest], Y[rest]), fusion="mean").rank_1
    p = protocol.known_unknown(IDS, Y, known=0.5, k=1)
    i = p.run(X, Y, IDS)
    assert (i.enrolled, len(i.mated), len(i.unknown)) == (20, 60, 80)
    with pytest.raises(InputError, match="nobody"):
        protocol.known_unknown(IDS, Y, known=1.0)
    with pytest.raises(InputError, match="nobody has more than 4"):
        protocol.k_shot(IDS, Y, k=4)


def test_listed_trials_name_ids():
    i, j = np.triu_indices(30, 1)
    trials = tuple((int(IDS[a]), int(IDS[b]), int(Y[a] == Y[b])) for a, b in zip(i, j, strict=True))
    p = Protocol("listed", "verification", tuple(IDS[:30].tolist()), trials=trials)
    assert p.run(X, Y, IDS).eer == verification(X[:30], Y[:30]).eer


def test_a_leak_fails_the_run():
    p = protocol.class_disjoint(IDS, Y)
    stolen = Protocol(p.name, p.kind, p.probes, (), (), (*p.training, p.probes[0]))
    with pytest.raises(DataError, match="leak between training and test: 1 with the same id .*same subject"):
        stolen.run(X, Y, IDS)
    person = Y[np.isin(IDS, p.probes)][0] == Y
    half = IDS[person]
    rest = tuple(i for i in p.probes if i not in half[:2])
    divided = Protocol("divided", "verification", rest, (), (), tuple(half[:2].tolist()))
    with pytest.raises(DataError, match="1 with the same subject"):
        divided.run(X, Y, IDS)
    hashes = np.asarray([f"{k:064x}" for k in range(len(Y))])
    train, test = np.isin(IDS, p.training), np.isin(IDS, p.probes)
    hashes[np.flatnonzero(test)[0]] = hashes[np.flatnonzero(train)[0]]
    p.run(X, Y, IDS)
    with pytest.raises(DataError, match="1 with the same hash"):
        p.run(X, Y, IDS, hashes=hashes)
    twice = Protocol("twice", "identification", p.probes, p.probes[:10])
    with pytest.raises(DataError, match="leak between gallery and probes: 10 with the same id"):
        twice.run(X, Y, IDS)


def test_the_gate_names_kinds_and_first_ones():
    a, b = (
        SplitSide(ids=[1, 2, 3, 4, 5], subjects=[1, 1, 2, 2, 3]),
        SplitSide(ids=[5, 4, 3, 2, 9], subjects=[3, 2, 2, 1, 8]),
    )
    with pytest.raises(DataError, match=r"4 with the same id \(2, 3, 4, …\); 3 with the same subject \(1, 2, 3\)"):
        assert_no_leakage(a, b)
    assert_no_leakage(SplitSide(subjects=[1, 2]), SplitSide(subjects=[1, 2]), disjoint_subjects=False)
    found = find_leakage(SplitSide(embeddings=X[:5]), SplitSide(embeddings=np.vstack([X[7], X[2] * 3])))
    assert [(leak.kind, leak.what) for leak in found] == [("near-duplicate", (2, 1))]
    with pytest.raises(InputError, match="one kind"):
        assert_no_leakage(SplitSide(ids=[1]), SplitSide(ids=["a"]))


def test_file_hashes_find_the_same_file_under_two_names(tmp_path):
    for name, text in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        (tmp_path / name).write_bytes(text)
    h = file_hashes([tmp_path / n for n in "abc"])
    with pytest.raises(DataError, match="same hash"):
        assert_no_leakage(SplitSide(hashes=h[:2]), SplitSide(hashes=h[2:]))
    with pytest.raises(DataError, match="cannot read"):
        file_hashes([tmp_path / "d"])


def test_pictures_that_look_alike_are_warned_about_and_fail_if_asked(tmp_path):
    rng = np.random.default_rng(3)
    pictures = [rng.integers(0, 256, (6, 6, 3)).astype(np.uint8).repeat(12, 0).repeat(12, 1) for _ in range(8)]
    paths = [tmp_path / f"{k}.png" for k in range(9)]
    for path, picture in zip(paths, pictures, strict=False):
        Image.fromarray(picture).save(path)
    Image.fromarray(pictures[2]).resize((50, 50)).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(paths[8])
    looks = picture_looks(paths)
    train, test = SplitSide(ids=range(5), looks=looks[:5]), SplitSide(ids=range(5, 9), looks=looks[5:])
    assert [(leak.kind, leak.what) for leak in assert_no_leakage(train, test)] == [("look", (2, 3))]
    with pytest.raises(DataError, match=r"1 with the same look \(\(2, 3\)\)"):
        assert_no_leakage(train, test, fail_on_similar=True)
    for wrong in (looks[:, :9], np.full_like(looks, np.nan), looks.astype(int)):
        with pytest.raises(InputError, match="looks must be"):
            assert_no_leakage(SplitSide(looks=wrong), SplitSide(looks=looks))
    with pytest.raises(DataError, match="cannot decode"):
        picture_looks([tmp_path / "none.png"])
    p = protocol.class_disjoint(IDS, Y)
    seen = rng.normal(size=(len(Y), looks.shape[1])).astype(np.float32)
    seen[p.probes[4] == IDS] = seen[p.training[7] == IDS]
    seen /= np.linalg.norm(seen, axis=1, keepdims=True)
    with pytest.warns(UserWarning, match=rf"1 pictures of test look like .*id {p.probes[4]} like {p.training[7]}"):
        p.run(X, Y, IDS, looks=seen)
    with pytest.raises(DataError, match="same look"):
        p.run(X, Y, IDS, looks=seen, fail_on_similar=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "no JSON"),
        ("[]", "format 1"),
        ('{"format": 2}', "format 1"),
        ('{"format": 1, "name": "x", "kind": "verification", "probs": [1]}', "did you mean 'probes'"),
        ('{"format": 1, "name": "x", "kind": "verification", "probes": [1.5]}', "whole numbers in probes"),
        ('{"format": 1, "name": "x", "kind": "verification", "probes": [true]}', "whole numbers in probes"),
        ('{"format": 1, "name": "x", "kind": "verification", "probes": [1, 1]}', "twice"),
        ('{"format": 1, "name": "x", "kind": "verifikation", "probes": [1]}', "did you mean 'verification'"),
        ('{"format": 1, "name": "x", "kind": "verification", "probes": []}', "no probes"),
        ('{"format": 1, "name": "x", "kind": "identification", "probes": [1]}', "needs a gallery"),
        ('{"format": 1, "kind": "verification", "probes": [1]}', "name"),
        ('{"format": 1, "name": "x", "kind": "verification", "probes": [1], "trials": [[1, 2]]}', "id, id, target"),
    ],
)
def test_files_that_make_no_sense_are_refused(content, words, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        Protocol.read(path)


def test_a_plan_and_its_data_must_fit(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        Protocol.read(tmp_path / "nowhere.json")
    p = protocol.k_shot(IDS, Y)
    with pytest.raises(DataError, match="have no embedding"):
        p.run(X[:50], Y[:50], IDS[:50])
    with pytest.raises(InputError, match="unique"):
        p.run(X, Y, IDS * 0)
    with pytest.raises(NotMeasurable, match="calibration"):
        p.transfer(X, Y, IDS, 0.01)
    assert json.loads(p.write(tmp_path / "p.json").read_text())["format"] == 1
