"""Sentence embeddings: a small transformer on token ids learns that two sentences say the same in other words.

python examples/text_embeddings.py [FOLDER]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import mettle
from mettle.evaluate import audit
from mettle.losses import SupCon
from mettle.report.audit_page import write_audit

WHO = ["dog hound pup", "cat kitten mouser", "horse pony mare", "hen rooster chick", "ship boat ferry", "car truck van"]
DOES = ["sleeps rests dozes", "runs races hurries", "waits stays lingers", "turns spins rolls", "sings hums whistles"]
WHERE = ["garden yard lawn", "street road lane", "harbor port dock", "forest wood grove", "valley dale hollow"]
TEMPLATES = [
    "the {who} {does} in the {where}",
    "in the {where} a {who} {does} today",
    "it is the {who} that {does} near the {where}",
    "look how a {who} {does} by the old {where}",
]
WORDS = sorted({word for text in (*WHO, *DOES, *WHERE, *TEMPLATES) for word in text.split() if "{" not in word})
LENGTH = 10


def encode(sentence: str) -> Tensor:
    """Token ids (LENGTH,), one for each word; 0 fills up."""
    ids = [1 + WORDS.index(word) for word in sentence.split()]
    return torch.tensor(ids + [0] * (LENGTH - len(ids)))


class Sentences(Dataset):
    """Facts (who does what where), each told in ten sentences with other words and another order."""

    def __init__(self, facts: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        known = [(who, does, where) for who in WHO for does in DOES for where in WHERE]
        self.labels = np.repeat(rng.permutation(len(known))[:facts], 10)
        self.texts = []
        for fact in self.labels:
            who, does, where = (str(rng.choice(words.split())) for words in known[fact])
            self.texts.append(str(rng.choice(TEMPLATES)).format(who=who, does=does, where=where))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Tensor:
        return encode(self.texts[i])


class Transformer(nn.Module):
    """Token ids (n, LENGTH) to (n, 32): one layer of attention, and the mean over what is not filled up."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1 + len(WORDS), width), nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """(n, 32) embeddings."""
        is_word = (ids > 0).unsqueeze(-1)
        x = self.encoder(self.tokens(ids) + self.positions, src_key_padding_mask=ids == 0)
        return self.head((x * is_word).sum(1) / is_word.sum(1))


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sentences")
sentences = Sentences(facts=120)
run = mettle.fit(Transformer(), sentences, SupCon(0.1), folder=folder, steps=60, batch=(32, 4), lr=3e-3, quiet=True)
print(f"EER of facts that were not trained on: {run.evaluate().verification.eer:.2%}")

same = run.embed(torch.stack([encode("a hound dozes by the old yard"), encode("the dog sleeps in the garden")]))
print("cosine of two sentences that say the same:", round(float(np.corrcoef(same)[0, 1]), 2))
elsewhere = mettle.open_run(folder)  # needs none of the code above: the run keeps its network as a graph
test = run.samples.part("test")
found = audit(elsewhere.embed(test.read(np.arange(len(test)))), test.labels)
print(write_audit(found, folder / "audit"))
