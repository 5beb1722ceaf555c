"""Observations as sglang_probe returns them, for the tests of what judges them."""


def observation(
    state="activating",
    sub="start",
    phase="loading_weights",
    age=0.0,
    described="loading weights",
    progress=1,
    listening=False,
    log=(),
    **unit,
):
    """Return one observation. age: seconds since the last progress. unit: what systemd says otherwise."""
    return {
        "unit": {
            "exists": True,
            "load_state": "loaded",
            "active_state": state,
            "sub_state": sub,
            "result": "success",
            "exit_code": 0,
            "exit_status": 0,
            "restarts": 0,
            "main_pid": 100,
            "invocation": "one",
            "age_s": 60.0,
            **unit,
        },
        "start": {
            "phase": phase,
            "part": "target",
            "described": described,
            "progress": progress,
            "progress_age_s": age,
            "phase_s": 100.0 + age,
            "bar": None,
            "leads": True,
            "history": [{"phase": phase, "part": "target", "at": 0.0}],
        },
        "http": {"listening": listening, "models": [], "models_status": None},
        "weights": {part: {"files": 0, "bytes": 0, "largest_bytes": 0} for part in ("target", "drafter")},
        "node": {"kernel": ["NVRM: Xid 79"], "kernel_readable": True, "gpus": None, "shm": None},
        "log": list(log),
    }
