"""Evidence on real data: small studies, several seeds each, run once on one GPU and kept as tables with intervals.

    python -m benchmarks.evidence NAME --data FOLDER --out FILE.json     one study
    python -m benchmarks.evidence write FILE.json ...                    its page in docs/results
    python -m benchmarks.evidence.two_encoder DATA                       relative difficulty on a set of one's own

    __main__ ─ worker_pool ─ market, cub200, cifar, spurious, tabular ─ contrastive ─ study ─ mettle
           └ report

A study says what is trained on what and how it is judged. Training itself is `mettle.train.run_loop` with the package's
methods, samplers and loader; probes are those of `mettle.evaluate`. Pictures are decoded once. Several seeds and
methods train side by side, because one small network does not fill a GPU. How long everybody trains follows from the
seconds that are allowed: the first thing measured is what a step costs. Everything that is chosen is chosen on
validation data.
"""
