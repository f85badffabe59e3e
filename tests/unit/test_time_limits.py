"""Time limits that the environment sets, for a program whose code is left alone."""

import pytest
import torch
from torch import nn

import loco


@pytest.mark.usefixtures("single_site")
def test_the_environment_sets_limits_and_an_argument_beats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCO_TIMEOUT", "30"), ("LOCO_PATIENCE", "60.5"), ("LOCO_DEAD_AFTER", "7")):
        monkeypatch.setenv(name, value)
    topology = loco.PulseLoCo(torch.optim.SGD([nn.Parameter(torch.ones(3))])).topology
    assert isinstance(topology, loco.Topology)
    assert (topology.timeout, topology.patience, topology.dead_after) == (30.0, 60.5, 7.0)
    assert loco.Topology(dead_after=2.0).dead_after == 2.0


@pytest.mark.parametrize("variable", ["LOCO_TIMEOUT", "LOCO_PATIENCE", "LOCO_DEAD_AFTER"])
@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_variable_that_is_no_limit_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    for topology in (loco.Topology, loco.Sites):
        with pytest.raises(ValueError, match=f"^{variable} must be > 0 seconds, got {value}$"):
            topology()
