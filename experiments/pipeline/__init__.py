"""Asynchronous reinforcement learning: sites train while workers sample, with a controller between them.

    prompts            controller            samples
       ┌──────────────────┘ └──────────────────┐
       ▼                                       ▼
    workers ◀──── patches (loco.sync) ──── site 0 ◀──── rounds (PULSELoCo) ────▶ site 1 …

Each part is a Ray actor, that is, a process of its own. Begin reading with `run.py`; the actors are in
`controller.py`, `worker.py` and `trainer.py`.
"""
