"""What do smaller embeddings cost? EER and Recall@1 of prefixes and precisions of the embeddings of a file.

    mettle embed runs/NAME glyphs -o NAME.npz
    python benchmarks/embedding_sizes.py NAME.npz --where split=test --dims 8 16 32 64

Every prefix and the whole length (`mettle.model.cut_embeddings`) in each precision (`quantize_embeddings`).
EER is over all pairs of samples, Recall@1 over all samples against all others, both by the scores of the codes.
"""

import argparse
from pathlib import Path
from typing import get_args

from mettle.data.quantization import Precision
from mettle.evaluate import read_embeddings, retrieval, verification
from mettle.model import cut_embeddings, quantize_embeddings


def print_sizes(path: Path, where: list[str], dims: list[int]) -> None:
    """The table of one file."""
    table = read_embeddings(path, where=where)
    z, labels = table.values, table.label.codes
    print(f"{path.name}: {len(z)} embeddings of {len(set(labels.tolist()))} labels")
    print("| numbers | precision | bytes | EER | Recall@1 |")
    print("|---:|---|---:|---:|---:|")
    for dim in [*(d for d in dims if d < z.shape[1]), z.shape[1]]:
        for precision in get_args(Precision):
            codes = quantize_embeddings(cut_embeddings(z, dim), precision)
            kept = codes.dequantize()  # whose cosines are the scores of the codes
            eer, first = verification(kept, labels).eer, retrieval(kept, labels, k=(1,)).recall[1]
            print(f"| {dim} | {precision} | {codes.bytes_per_vector} | {eer:.2%} | {first:.1%} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE")
    parser.add_argument("--dims", nargs="*", type=int, default=[])
    given = parser.parse_args()
    for file in given.files:
        print_sizes(file, given.where, given.dims)
