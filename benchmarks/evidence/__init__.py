"""Evidence on real data: small studies, several seeds each, run once on one GPU and kept as tables with intervals.

    python -m benchmarks.evidence NAME --data FOLDER --out FILE.json     one study
    python -m benchmarks.evidence write FILE.json ...                    its page in docs/results

    python -m benchmarks.evidence.two_encoder DATA                       relative difficulty on a set of one's own

    __main__ ─ worker_pool ─ study (market, cub200, cifar, spurious, tabular) ─ contrastive ─ fit ─ data
                                                                                             └ probes
    write ── report

Pictures are decoded once, kept on the device and augmented there. Several seeds and methods train side by side, because
one small network does not fill a GPU. How long everybody trains follows from the seconds that are allowed: the first
thing measured is what a step costs. Everything that is chosen is chosen on validation data.
"""
