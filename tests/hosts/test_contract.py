"""What holds in every host: each test runs for a model of each, or for every model of each."""

import pytest
import torch
from common import AS_FAST, EVERYTHING, ONLY_KEYS, attributes, relative_error
from under_test import MERGING, ONE_OF_EACH, SEVERAL, SKIPPING

MERGES = {"ratio": 0.5, "max_downsample": "auto"}
SKIPS = {"ratio": 0.6, "preset": "fast"}
STEPS = 8

# For float32 in these models, whose weights amplify rounding.
ROUNDING = 5e-5


def of(models):
    return pytest.mark.parametrize("host", models, indirect=True)


each = of(ONE_OF_EACH)
ways = pytest.mark.parametrize("options", [MERGES, SKIPS], ids=["merging", "skipping"])


def started(host, options):
    """The latent without a patch; the test is skipped if the host lacks what the options are for.

    It is of a second run: the host may keep something of its own of the first.
    """
    if options is MERGES and not host.is_unet:
        host.needs("merging in transformers")
    host(STEPS)
    return host(STEPS)


def as_before_without(host, options, steps):
    """A patched run is another, and the same each time; then all is as it was."""

    def run():
        torch.manual_seed(0)
        return host(steps), torch.get_rng_state()

    # As above.
    run()
    (plain, random), before = run(), attributes(host.network)
    host.patch(**options)
    (patched, random_after), (again, _) = run(), run()
    assert patched.isfinite().all() and 1e-4 < relative_error(patched, plain) < 1
    assert torch.equal(again, patched)
    assert torch.equal(random_after, random)
    host.undo()
    assert attributes(host.network) == before
    assert torch.equal(run()[0], plain)


@of(MERGING)
def test_every_model_merges_and_is_as_before_without(host, log_messages):
    as_before_without(host, MERGES, 2)
    plain = host()
    host.patch(lossless=True, **EVERYTHING)
    assert relative_error(host(), plain) < ROUNDING
    assert log_messages()[-1].startswith(f"[ToMe] merged {host.blocks}/{host.blocks} blocks ")


@of(SKIPPING)
def test_every_model_skips_the_steps_that_the_line_says_and_is_as_before_without(
    host, log_messages
):
    as_before_without(host, SKIPS, STEPS)
    assert host.skipped(STEPS)[0] == set()
    host.patch(**SKIPS)
    skipped, _ = host.skipped(STEPS)
    words = f"{len(skipped)}/{STEPS} steps"
    if host.is_unet:
        line = f"[ToMe] shallow {words}"
    else:
        line = f"[ToMe] forecast {words} ({', '.join(str(step + 1) for step in sorted(skipped))})"
    assert skipped and log_messages()[-1].startswith(line)


@of(SEVERAL)
@pytest.mark.parametrize(
    "options",
    [{"attn_tokens": "q,k,v"}, {"attn_tokens": "k,v"}, ONLY_KEYS, {"scope": "stack"}, AS_FAST],
    ids=["q,k,v", "k,v", "keys", "stack", "fast"],
)
def test_a_lossless_plan_reproduces_the_model_in_every_scope(host, options, log_messages):
    expected = host()
    host.patch(lossless=True, **EVERYTHING, **options)
    assert relative_error(host(), expected) < ROUNDING
    assert log_messages()[-1].startswith(f"[ToMe] merged {host.blocks}/{host.blocks} blocks ")


@each
@ways
def test_patching_again_replaces_the_settings_and_a_ratio_of_0_removes_them(
    host, options, log_messages
):
    plain, before = started(host, options), attributes(host.network)
    host.patch(**options)
    once = host(STEPS)
    host.patch(**options | {"ratio": 0.9})
    assert not torch.equal(host(STEPS), once)
    host.patch(**options)
    assert torch.equal(host(STEPS), once)
    lines = log_messages()
    host.patch(**options | {"ratio": 0.0})
    assert attributes(host.network) == before
    assert torch.equal(host(STEPS), plain)
    assert log_messages() == lines


@each
def test_a_ratio_of_0_skips_nothing_whatever_its_end(host):
    host.patch(ratio=0.0, ratio_end=0.4, forecast=True)
    assert host.skipped(STEPS)[0] == set()
