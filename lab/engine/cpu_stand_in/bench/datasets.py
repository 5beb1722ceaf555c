# stand-in: sglang.bench_serving imports it for data sets that are downloaded; on PYTHONPATH of the benchmark alone


def load_dataset(*a, **k):
    raise RuntimeError("the lab downloads no data sets")
