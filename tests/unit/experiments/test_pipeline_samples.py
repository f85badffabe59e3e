"""What trainers learn from: samples whose weights changed on the way, and the losses that allow for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pipeline_parts import config_of
from torch import Tensor

from experiments.models.model import ByteTransformer
from experiments.pipeline.config import CORRECTIONS
from experiments.pipeline.learning.losses import learn, losses_of
from experiments.pipeline.samples import Group, groups_of
from experiments.settings.config import TransformerConfig
from experiments.tasks.rollout import Decoding, Rollout, Weights, sample

LIMITS: dict[str, float] = {"ratio_limit": 4.0, "clip_low": 0.2, "clip_high": 0.28}
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8]]


def gradient(correction: str, logp: Sequence[float], old: Sequence[float], advantage: Tensor) -> Tensor:
    now = torch.tensor(logp, requires_grad=True)
    losses_of(correction, now, torch.tensor(old), advantage, **LIMITS).sum().backward()
    assert now.grad is not None
    return now.grad


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_samples_of_todays_weights_have_the_policy_gradient(correction: str) -> None:
    advantage = torch.tensor([1.5, -0.5])
    assert torch.equal(gradient(correction, [-1.0, -2.0], [-1.0, -2.0], advantage), -advantage)


def test_aipo_weighs_a_token_by_its_ratio_up_to_a_limit() -> None:
    ratios = torch.tensor([0.5, 2.0, 100.0])
    found = gradient("aipo", (ratios.log() - 5).tolist(), [-5.0] * 3, torch.ones(3))
    torch.testing.assert_close(found, torch.tensor([-0.5, -2.0, -4.0]))


def model_of(seed: int) -> ByteTransformer:
    return ByteTransformer(TransformerConfig(dim=16, layers=2, heads=2, context=16), seed=seed)


def sampled(model: ByteTransformer, before_token: Callable[[], Weights] | None = None) -> Rollout:
    uniforms = torch.rand(len(PROMPTS) * 2, 6, generator=torch.Generator().manual_seed(1))
    cpu = torch.device("cpu")
    return sample(
        model,
        PROMPTS,
        group=2,
        decoding=Decoding(longest=6, stops=(10,)),
        uniforms=uniforms,
        device=cpu,
        before_token=before_token,
    )


def in_turn(model: ByteTransformer, *, recompute: bool) -> tuple[Rollout, list[dict[str, Tensor]]]:
    """Before each token other weights -> and these, by version."""
    given: list[dict[str, Tensor]] = []

    def before_token() -> Weights:
        weights = model_of(len(given)).state_dict()
        model.load_state_dict(weights)
        given.append(weights)
        return Weights(len(given) - 1, recompute)

    return sampled(model, before_token), given


def logp_by(weights: dict[str, Tensor], row: Tensor, place: int) -> float:
    model = model_of(0)
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(row[None, :place])[0, -1]
    return float(logits.log_softmax(dim=-1)[row[place]])


def test_a_hook_that_changes_nothing_changes_nothing() -> None:
    plain, watched = sampled(model_of(0)), sampled(model_of(0), lambda: Weights(7, False))
    assert plain.texts == watched.texts
    assert all(torch.equal(a, b) for a, b in zip(plain.logp, watched.logp, strict=True))
    assert not plain.versions
    assert all((versions == 7).all() for versions in watched.versions)
    assert [len(versions) for versions in watched.versions] == [len(logp) for logp in plain.logp]


def test_each_token_has_the_probability_that_its_version_gives_it() -> None:
    """With the cache made anew, all that a token depends on is of one version."""
    rollout, given = in_turn(model_of(0), recompute=True)
    checked = 0
    for row, logp, versions in zip(rollout.tokens, rollout.logp, rollout.versions, strict=True):
        head = len(row) - len(logp)
        for place, (found, version) in enumerate(zip(logp.tolist(), versions.tolist(), strict=True)):
            # The cache sums in another order than one pass over all tokens does.
            assert found == pytest.approx(logp_by(given[version], row, head + place), abs=1e-5)
            checked += 1
    assert checked > 12


def test_a_cache_that_is_kept_remembers_older_weights() -> None:
    kept, given = in_turn(model_of(0), recompute=False)
    row, logp, version = kept.tokens[0], kept.logp[0], int(kept.versions[0][-1])
    head = len(row) - len(logp)
    assert abs(float(logp[-1]) - logp_by(given[version], row, head + len(logp) - 1)) > 1e-3


def gradients(*settings: str, reference: ByteTransformer | None = None) -> Tensor:
    """Of a step's loss, with answers of another model."""
    model, rollout = model_of(1), sampled(model_of(0))
    rollout = replace(rollout, versions=[torch.ones_like(logp) for logp in rollout.logp])
    groups = groups_of(rollout, torch.tensor([1.0, 0, 0, 0, 1, 1]), 2)  # one has an advantage
    learn(model, groups, config_of(*settings), reference)
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("kl", ["kl=0", "kl=0.5"])
def test_a_step_learns_the_same_in_parts(kl: str) -> None:
    reference = model_of(2).requires_grad_(False) if kl != "kl=0" else None
    whole = gradients(kl, reference=reference)
    for size in (1, 4):
        # Sums in another order: FP32's rounding.
        torch.testing.assert_close(
            gradients(kl, f"micro_batch={size}", reference=reference), whole, rtol=1e-4, atol=1e-7
        )


def test_the_distance_from_the_first_model_pulls_towards_it() -> None:
    """Its gradient is 0 at that model, and elsewhere Σ (1 − r) ∇ log π."""
    plain = gradients()
    torch.testing.assert_close(gradients("kl=3", reference=model_of(1)), plain, rtol=1e-4, atol=1e-7)
    reference = model_of(2)
    found = (gradients("kl=3", reference=reference) - plain) / 3
    model, rollout = model_of(1), sampled(model_of(0))
    total = torch.zeros(())
    for tokens, old in zip(rollout.tokens, rollout.logp, strict=True):
        head = len(tokens) - len(old)
        at = torch.arange(len(old))
        logp = model(tokens[None, :-1])[0, head - 1 :].log_softmax(-1)[at, tokens[head:]]
        with torch.no_grad():
            wanted = reference(tokens[None, :-1])[0, head - 1 :].log_softmax(-1)[at, tokens[head:]]
        total = total + ((1 - torch.exp(wanted - logp.detach())) * logp).sum()
    (total / sum(map(len, rollout.logp))).backward()
    expected = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_groups_travel_whole() -> None:
    rollout, _ = in_turn(model_of(0), recompute=True)
    groups = groups_of(rollout, torch.tensor([1.0, 0, 0, 0, 1, 1]), 2)
    assert len(groups) == 3
    for k, group in enumerate(groups):
        again = Group.unpacked(group.packed())
        assert group.head.tolist() == PROMPTS[k]
        for i, row in enumerate(again.rows()):
            assert torch.equal(row, rollout.tokens[2 * k + i])
            assert torch.equal(again.split(again.logp)[i], rollout.logp[2 * k + i])
            assert torch.equal(again.split(again.versions)[i], rollout.versions[2 * k + i])
        assert again.advantage.tolist() == group.advantage.tolist()
    assert groups[0].advantage[0] > 0 > groups[0].advantage[1]
    assert not groups[1].advantage.any()


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:7], lambda b: b"", lambda b: b + bytes(4)])
def test_what_is_no_group_is_refused(damage: Callable[[bytes], bytes]) -> None:
    rollout, _ = in_turn(model_of(0), recompute=True)
    packed = groups_of(rollout, torch.zeros(6), 2)[0].packed()
    with pytest.raises(ValueError, match="are not a group"):
        Group.unpacked(damage(packed))
