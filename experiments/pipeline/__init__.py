"""Reinforcement learning that does not wait: sites train, workers sample, a controller is between them.

    prompts            controller            samples
       ┌──────────────────┘ └──────────────────┐
       ▼                                       ▼
    workers ◀──── patches (loco.sync) ──── site 0 ◀──── rounds (PULSELoCo) ────▶ site 1 …

Each of them is a Ray actor, a process of its own. `run.py` is the place to begin reading; the actors are in
`controller.py`, `worker.py` and `trainer.py`.
"""
