"""Which setting records what: said wherever a table or a chart would otherwise be empty."""

DRIFT = "drift.enabled=true"
TRACES = "drift.trace_every=N (a trace file every N steps)"
SCORES = "drift.scores_share=0.1 (the share of tokens)"
PROBE = "drift.probe_every=N (passes of their own every N steps)"
REPLAY = "replay.mode=r2, r3 or filtered"

# comparison and view -> what records it
VIEWS: dict[tuple[str, str], str] = {
    ("update", ""): DRIFT,
    ("update", "prompt"): DRIFT,
    ("update", "local"): f"{DRIFT} and {REPLAY}",
    ("update", "free"): f"{PROBE} and {REPLAY}",
    ("engine", ""): PROBE,
    ("noise", ""): PROBE,
    ("probe", ""): PROBE,
}

MEANING: dict[tuple[str, str], str] = {
    ("update", ""): "old against new weights, the routes that were used",
    ("update", "prompt"): "old against new weights, prompt tokens",
    ("update", "local"): "old against new weights, what routers would choose inside the replayed pass",
    ("update", "free"): "old against new weights, what a pass without replay chooses",
    ("engine", ""): "the engine that sampled against the trainer's recomputation, the same weights",
    ("noise", ""): "two computations with the same weights: the floor",
    ("probe", ""): "a fixed set of sequences, now against the start of the run",
}


def meaning(comparison: str, view: str) -> str:
    """What is compared; for a view that has no entry, the comparison's and the view's name."""
    return MEANING.get((comparison, view)) or f"{MEANING.get((comparison, ''), comparison)}, view {view}"
