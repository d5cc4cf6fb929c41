"""Audit embeddings of any model: errors with intervals, the worst group, labels that are probably wrong.

python examples/audit_embeddings.py [FOLDER]
"""

import sys

import numpy as np

from mettle.evaluate import audit
from mettle.report.audit_page import write_audit

# What another model left behind: 80 parts, 8 embeddings of each from two cameras, the second of which is out of focus;
# five rows carry the label of another part.
rng = np.random.default_rng(0)
part, camera = np.repeat(np.arange(80), 8), np.tile(["sharp", "blurred"], 320)
noise = np.where(camera == "sharp", 0.6, 1.2)[:, None] * rng.normal(size=(640, 32))
embeddings = rng.normal(size=(80, 32))[part] + noise
labels = part.copy()
wrong = rng.choice(np.flatnonzero(camera == "sharp"), 5, replace=False)
labels[wrong] = (part[wrong] + 40) % 80

found = audit(embeddings, labels, domains=camera)
for name, way in found.ways.items():
    interval = way.verification.interval("eer")
    print(f"{name:<13} EER {way.verification.eer:.2%} [{interval.low:.2%}, {interval.high:.2%}]")
for group in found.groups["domains"].rank_groups():
    print(f"{group.name:<13} EER {group.values['eer']:.2%}")
print("relabeled by the example:", sorted(wrong.tolist()))
print("most suspicious labels:  ", sorted(found.label_errors.order[:5].tolist()))
print(write_audit(found, sys.argv[1] if len(sys.argv) > 1 else "runs/parts-audit"))
