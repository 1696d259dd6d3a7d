"""Comparison of two scores."""

from varuna_capslog.training.journal import goodness


def test_losses_are_better_when_they_are_smaller() -> None:
    assert goodness("AP", 0.4) > goodness("AP", 0.3)
    assert goodness("val_loss", 0.3) > goodness("val_loss", 0.4)
    assert goodness("perplexity", 9) > goodness("perplexity", 10)
    assert goodness("lossless", 2) > goodness("lossless", 1)
