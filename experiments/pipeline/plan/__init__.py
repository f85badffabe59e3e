"""How to split devices between training and sampling, before a run. Begin reading with `planning.py`."""
